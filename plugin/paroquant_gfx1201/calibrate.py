"""Second moments of every linear layer's inputs, from a short forward over a text."""

from collections.abc import Callable
from pathlib import Path

import torch

from paroquant_gfx1201.errors import PluginError

SEQUENCE_TOKENS = 512
MAX_TOKENS = 8192
MIN_TOKENS = SEQUENCE_TOKENS


def input_grams(
    model_directory: Path,
    text: str,
    names: list[str],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, torch.Tensor]:
    """X^T X f32 [K, K] per module name, over at most MAX_TOKENS tokens of ``text``.

    ``names`` are module names without ``.weight``. Modules fed by one tensor (q, k and v; gate and
    up) share one entry object. Raises PluginError if the text is too short to say anything or a
    name is no linear module of the model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    # A character count that is certain to hold MAX_TOKENS keeps the tokenizer off a whole corpus.
    tokens = tokenizer(text[: MAX_TOKENS * 16], return_tensors="pt").input_ids[0][:MAX_TOKENS]
    if len(tokens) < MIN_TOKENS:
        raise PluginError(f"the calibration text has {len(tokens)} tokens, at least {MIN_TOKENS} are needed")
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.bfloat16).eval()
    modules = dict(model.named_modules())
    missing = [name for name in names if not isinstance(modules.get(name), torch.nn.Linear)]
    if missing:
        raise PluginError(f"{missing[0]} is not a linear layer of the model in {model_directory}")

    grams: dict[str, torch.Tensor] = {}
    owner: dict[str, str] = {}
    previous: tuple[torch.Tensor | None, str] = (None, "")

    def record(name: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            nonlocal previous
            if arguments[0] is previous[0]:
                owner[name] = previous[1]
                return
            previous = (arguments[0], name)
            x = arguments[0].flatten(0, -2).float()
            grams[name] = x.T @ x + grams[name] if name in grams else x.T @ x

        return hook

    handles = [modules[name].register_forward_pre_hook(record(name)) for name in names]
    sequences = tokens[: len(tokens) // SEQUENCE_TOKENS * SEQUENCE_TOKENS].view(-1, SEQUENCE_TOKENS)
    with torch.inference_mode():
        for done, sequence in enumerate(sequences):
            model.model(sequence.unsqueeze(0), use_cache=False)
            progress(done + 1, len(sequences))
    for handle in handles:
        handle.remove()
    return {name: grams[owner.get(name, name)] for name in names}
