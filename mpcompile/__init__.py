"""mpcompile: mixed-precision training as a compiler pass for PyTorch."""
