"""The CUDA lanes: kernels in ``.cu`` files, how they are compiled, what they are told and how they are launched.

``build`` makes a cubin for a layer's formats, ``kernels`` loads it, ``words`` has the structs, ``buffers`` their sizes,
``launch`` the grids. What they share with the processor's kernels is the format table and the layout of an
expert. Importing the package loads neither CuPy nor a compiler.
"""
