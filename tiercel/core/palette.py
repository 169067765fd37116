"""The colours of stages, MTP layers and other sources of tokens: the report and the live page show the same."""

from pathlib import Path

PALETTE = Path(__file__).with_name("palette.css")
"""Style sheet with the colours as variables, light and dark, and the classes that use them."""
