"""The executor of KV-Runahead chains: what their ranks do, all in one array, and when they have done it."""
