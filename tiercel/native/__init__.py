"""The CPU library: quantised matrices and whole steps of a model in one native call. C++ in ``csrc``, bound by ctypes."""
