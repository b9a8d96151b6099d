"""The benchmark of the overlap loop against stock, and the checks on a CUDA device."""
