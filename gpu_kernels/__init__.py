"""gpu_kernels"""
