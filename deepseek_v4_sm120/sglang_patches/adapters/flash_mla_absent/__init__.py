"""Stands in for the pip package `flash_mla` where SGLang 0.5.12 calls it and it is not installed (its wheel does not
require it). The patch replaces `flash_mla_with_kvcache` as it does in the real package; what is defined here runs only
for calls that the patch does not serve.
"""

from flash_mla.flash_mla_interface import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]
