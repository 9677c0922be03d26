"""Accelerator kernels. Nothing here is imported by the CPU path."""
