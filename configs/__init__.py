"""Packaged configurations: `evenload train tiny` reads tiny.yaml from here."""
