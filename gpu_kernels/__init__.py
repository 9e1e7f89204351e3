"""Where the CUDA lanes live. None are in this release: everything runs on the processor and the host device.

CUDA C++ sources will stand beside the Python files that launch them. What they share with the processor's
kernels is the format table and the layout of an expert, and nothing else.
"""
