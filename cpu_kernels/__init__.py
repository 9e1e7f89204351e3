"""cpu_kernels"""
