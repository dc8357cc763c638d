"""tierkv keeps the KV cache that a language model has computed, in tiers, and brings it back."""

__version__ = "0.1.0"
