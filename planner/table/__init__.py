"""Partition tables: how they are built, stored and used."""
