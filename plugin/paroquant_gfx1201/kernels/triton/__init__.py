"""Portable kernels in Triton: activation producer, decode GEMM (Hopper has its own), prefill GEMM. Imports triton.

Tensors in and out are plain torch tensors on one device; ``weights.pack`` brings a projection into
the layout that both GEMMs read.
"""
