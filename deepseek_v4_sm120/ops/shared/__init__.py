"""What the operators share: the compiled module, the page layout, argument checks, words between blocks, the device."""
