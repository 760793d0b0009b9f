"""The Triton kernels on a GPU (`pytest -m gpu`), in three parts that benchmarks/gpu_call.sh runs one after another.

grid      lengths, head dims, dtypes and head groups, forward and gradients
options   windows, offsets, lengths, poisoned padding, precision, tiles, transformations, bitwise repeats, choice
extremes  more than 2**31 elements, more than 65535 programs, compile time, compute-sanitizer
"""
