"""Models some of whose layers are linear attention or state-space layers."""
