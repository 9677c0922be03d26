"""Declarative experiments and A/B decisions for LLM serve variants."""

__version__ = "0.1.0"
