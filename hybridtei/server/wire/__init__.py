"""Requests and responses as the world spells them."""
