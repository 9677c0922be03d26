"""On-disk formats: ParoQuant int4, int4 Lloyd and int5-bitplane, MXFP4-PARO, NVFP4.

``spec``, ``mxfp4``, ``nvfp4`` and ``checkpoint`` read configs and headers without torch; ``packing``,
``fp4`` and ``projection`` need it. ``catalog`` goes from a directory to its layers.
"""
