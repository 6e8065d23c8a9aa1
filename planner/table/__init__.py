"""Partition tables: built, stored, looked up."""
