"""On-disk formats: ParoQuant int4 (AWQ words) and int5-bitplane.

``spec`` and ``checkpoint`` read configs and headers without torch; ``packing`` and ``projection``
need it.
"""
