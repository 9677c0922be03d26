"""Kernels for gfx1201 in HIP: activation producers, decode, prefill and skinny GEMMs.

Sources compile with clang alone (``codeobject``), for the GPU against ``device.h`` here and for the CPU against that of
``kernels/simt``. ``layout`` and ``weights`` build on the CPU what they read.
"""
