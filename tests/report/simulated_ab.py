"""A whole A/B of simulated servers that measure what every picture of its report shows. All numbers are drawn."""

from __future__ import annotations

import random
from dataclasses import replace

from orchestrator.abtest.design import Slot
from orchestrator.records import Measurement
from tests.report import madeup

QUESTIONS = 40
SLOWER = {"a": 1.0, "b": 0.955}  # time of arm B over that of arm A
EVIL = "</pre></details><script>document.title='taken over'</script><img src=x onerror=\"document.title='taken'\">"


def also(slot: Slot) -> tuple[Measurement, ...]:
    """What this boot measures besides the gate's two metrics; the same for a boot that is done again."""
    chance = random.Random(f"report/{slot.block}/{slot.position}/{slot.arm}")

    def varied(found: Measurement, up: bool) -> Measurement:
        """Each number a little off; `up` where more is faster."""
        scale = SLOWER[slot.arm] ** (-1 if up else 1)
        metrics = {
            name: value * scale * (1 + chance.gauss(0, 0.006)) if value and not name.endswith("_n") else value
            for name, value in found.metrics.items()
        }
        return replace(found, metrics=metrics, notes=(*found.notes, "simulated"))

    return (
        varied(madeup.betterbench(), up=True),
        replace(varied(madeup.kld(), up=slot.arm == "a"), config={"reference_stack": "stack0000"}),
        acceptance(slot, chance),
        questions(slot, chance),
    )


def acceptance(slot: Slot, chance: random.Random) -> Measurement:
    better = 0.03 if slot.arm == "b" else 0.0
    shares = {f"acceptance.accepted_share.pos{n}": 0.82**n * (0.8 + better) + chance.gauss(0, 0.004) for n in range(7)}
    return madeup.made("acceptance", {"acceptance.acceptance_length": 1 + sum(shares.values()), **shares})


def questions(slot: Slot, chance: random.Random) -> Measurement:
    """Both arms fail every eighth one; A besides it 3, B besides it 11 and 19; the text of one is an attack."""
    samples = []
    for n in range(QUESTIONS):
        wrong = n % 8 == 7 or (slot.arm == "a" and n == 3) or (slot.arm == "b" and n in (11, 19))
        said = n + 1 if wrong else n
        text = f"First there are {n} apples.\nThen none is eaten, so the answer is {said}."
        samples.append(
            {
                "id": f"wp-{n:03d}",
                "answer": f"There are {n}.\n#### {n}",
                "completion": text + (f"\n{EVIL}" if n == 11 else ""),
                "finish_reason": "stop",
                "error": "",
                "extracted_strict": None,
                "extracted_flexible": str(said),
                "correct_strict": False,
                "correct_flexible": not wrong,
            }
        )
    right = sum(sample["correct_flexible"] for sample in samples)
    metrics = {"word_problems.accuracy_flexible": right / QUESTIONS, "word_problems.accuracy_flexible_n": QUESTIONS}
    return madeup.made("gsm8k", metrics, tuple(samples), config={"source": "own", "n": QUESTIONS})
