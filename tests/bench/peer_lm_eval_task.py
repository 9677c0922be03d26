"""lm-evaluation-harness 0.4.13 as a whole, on a local task file: it renders, asks, filters and scores by itself.

python peer_lm_eval_task.py QUESTIONS.jsonl BASE_URL MODEL INSTRUCTION MAX_TOKENS OUT.json

writes {filter: {question id: [extracted, correct]}}. The task is the harness's own gsm8k.yaml on other questions and
with the instruction in place of its few-shot prompt.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml


def task(questions: str, instruction: str, max_tokens: int) -> dict[str, Any]:
    import lm_eval

    shipped = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml").read_text())
    kept = {name: shipped[name] for name in ("output_type", "doc_to_target", "metric_list", "filter_list", "repeats")}
    return {
        **kept,
        "task": "local_word_problems",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": questions}},
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": "{{question}}\n\n" + instruction,
        "generation_kwargs": {
            "until": ["<|im_end|>"],
            "do_sample": False,
            "temperature": 0.0,
            "max_gen_toks": max_tokens,
        },
    }


def main(questions: str, base_url: str, model: str, instruction: str, max_tokens: str, out: str) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.openai_completions import LocalChatCompletion
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "local_word_problems.yaml"
        path.write_text(yaml.safe_dump(task(questions, instruction, int(max_tokens))))
        server = LocalChatCompletion(base_url=f"{base_url}/v1/chat/completions", model=model, num_concurrent=1)
        found = simple_evaluate(
            server,
            tasks=["local_word_problems"],
            task_manager=TaskManager(include_path=directory, include_defaults=False),
            apply_chat_template=True,
            bootstrap_iters=0,
        )
    scores: dict[str, dict[str, list[Any]]] = {}
    for sample in found["samples"]["local_word_problems"]:
        one = [sample["filtered_resps"][0], bool(sample["exact_match"])]
        scores.setdefault(sample["filter"], {})[sample["doc"]["id"]] = one
    Path(out).write_text(json.dumps(scores))


if __name__ == "__main__":
    main(*sys.argv[1:])
