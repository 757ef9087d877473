"""A Hugging Face causal language model as the decode loop sees it: sequences or last tokens in, next-token logits out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from vcpo.errors import ConfigError, WeightSyncError
from vcpo.rollout.kv_cache import RowCache


class CausalLM:
    """Wraps `model`; raises ConfigError for one that does not work on a plain key/value cache."""

    def __init__(self, model: nn.Module, *, pad_token_id: int) -> None:
        self.model = model
        self._pad_token_id = pad_token_id
        accepts = _forward_parameters(model)
        # transformers renamed the argument in 5.24 and warns about the old name; one of the two is always there.
        names = [name for name in ("cache", "past_key_values") if name in accepts]
        if not names or getattr(model, "_is_stateful", False):
            raise ConfigError(
                f"{type(model).__name__} keeps no key/value cache: the embedded engine cannot sample from it"
            )
        self._cache_argument = names[0]
        self._takes_positions = "position_ids" in accepts
        self._extra: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in accepts:
            self._extra["logits_to_keep"] = 1

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter is."""
        return next(self.model.parameters()).device

    @property
    def logprob_dtype(self) -> torch.dtype:
        """float64 for a float64 model, else float32."""
        return torch.float64 if next(self.model.parameters()).dtype == torch.float64 else torch.float32

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        head = cast("Any", self.model).get_output_embeddings()
        return head.weight.shape[0] if head is not None else self._config().vocab_size

    def check_prompt(self, token_ids: Sequence[int], max_new_tokens: int, who: str) -> None:
        """Raise ConfigError unless the model can read the prompt and write `max_new_tokens` after it."""
        size = self.vocab_size
        wrong = [t for t in token_ids if not 0 <= t < size]
        if wrong:
            raise ConfigError(f"{who}: prompt token {wrong[0]} is not in the model's vocabulary of {size} tokens")
        limit = getattr(self._config(), "max_position_embeddings", None)
        if limit is not None and len(token_ids) + max_new_tokens > limit:
            raise ConfigError(
                f"{who}: {len(token_ids)} prompt tokens and max_new_tokens={max_new_tokens}"
                f" are more than the model's {limit} positions"
            )

    def prefill(self, sequences: Sequence[tuple[int, ...]], cache: RowCache) -> Tensor:
        """Read whole sequences into the empty `cache`, equal ones once; returns next-token logits [n, V]."""
        place = {ids: row for row, ids in enumerate(dict.fromkeys(sequences))}
        lengths = torch.tensor([len(ids) for ids in place])
        width = int(lengths.max())
        padded = [[self._pad_token_id] * (width - len(ids)) + list(ids) for ids in place]
        positions = (torch.arange(width) - (width - lengths).unsqueeze(1)).clamp_(min=0)
        logits = self.next_logits(
            torch.tensor(padded, device=self.device),
            real_columns=lengths.to(self.device),
            positions=positions.to(self.device),
            cache=cache,
            padded=bool((lengths < width).any()),
        )
        if len(place) == len(sequences):
            return logits
        rows = torch.tensor([place[ids] for ids in sequences], device=self.device)
        cache.select(rows)
        return logits.index_select(0, rows)

    def next_logits(
        self, input_ids: Tensor, *, real_columns: Tensor, positions: Tensor, cache: RowCache, padded: bool
    ) -> Tensor:
        """Append `input_ids` [n, q] to the cache; logits [n, V] after the last one.

        `real_columns` [n]: how many of a row's columns, new ones included, are real; they are the rightmost ones.
        `padded`: whether any row has fewer than all (without padding the mask is left out, which is faster).
        """
        kwargs: dict[str, Any] = {self._cache_argument: cache, **self._extra}
        if padded:
            width = cache.columns + input_ids.shape[1]
            kwargs["attention_mask"] = torch.arange(width, device=input_ids.device) >= (width - real_columns).unsqueeze(
                1
            )
        if self._takes_positions:
            kwargs["position_ids"] = positions
        return self.model(input_ids, **kwargs).logits[:, -1]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Dropout off inside; every module's mode is left as found."""
        training = [module for module in self.model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True

    def load_weights(self, named: Mapping[str, Tensor]) -> None:
        """Copy `named` into the model, cast to its dtypes; a tied weight may come under any of its names.

        Raises WeightSyncError, before anything is copied, for an unknown name, another shape, or a missing parameter.
        """
        targets = self.model.state_dict(keep_vars=True)
        for name, tensor in named.items():
            if name not in targets:
                raise WeightSyncError(f"published weights have {name!r}, which the sampler's model lacks")
            if targets[name].shape != tensor.shape:
                raise WeightSyncError(
                    f"published {name!r} is {list(tensor.shape)}, in the sampler's model it is {list(targets[name].shape)}"
                )
        covered = {id(targets[name]) for name in named}
        missing = [name for name, p in self.model.named_parameters() if id(p) not in covered]
        if missing:
            raise WeightSyncError(f"published weights lack {missing[0]!r} ({len(missing)} parameters in all)")
        with torch.no_grad():
            for name, tensor in named.items():
                targets[name].copy_(tensor)

    def _config(self) -> Any:
        return cast("Any", self.model).config.get_text_config(decoder=True)


def _forward_parameters(model: nn.Module) -> set[str]:
    # A wrapper (peft) takes **kwargs: what it passes on to is what counts.
    inner = cast("Any", model).get_base_model() if hasattr(model, "get_base_model") else model
    return set(inspect.signature(inner.forward).parameters)
