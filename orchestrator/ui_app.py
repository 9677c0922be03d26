"""MLflow's own application, with Python's garbage collector out of the way of a search.

A search of 100 runs makes tens of thousands of small objects that live until it is answered. With CPython's defaults
the collector walks all of them again and again and finds nothing: half of the time that 100 runs of 500 metrics take
(docs/benchmarks.md, "Many runs"). MLflow starts it by the entry point `paro-orchestrator` of `mlflow.app`.
"""

import gc

from mlflow.server.fastapi_app import app

__all__ = ["app"]

gc.collect()
gc.freeze()
gc.set_threshold(100_000, 50, 100)
