"""All that knows SGLang: the table of patches, our defaults, the models served, shadow mode, the adapters."""
