# A Python, and three ways in which an image changes the environment between the engine and the server.
ARG BASE=debian:bookworm
FROM ${BASE}
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends python3 >/dev/null && rm -rf /var/lib/apt/lists/*
RUN printf '#!/bin/sh\nunset RADIANCE_PQ_ZPE\nexec python3 "$@"\n' >/usr/local/bin/drops-a-knob \
    && printf '#!/bin/sh\nexport RADIANCE_PQ_ZPE=7\nexec python3 "$@"\n' >/usr/local/bin/changes-a-knob \
    && chmod 755 /usr/local/bin/*-a-knob
ENTRYPOINT ["/usr/local/bin/drops-a-knob", "-c", "raise SystemExit(9)"]
