"""The policy: a causal language model, its tokenizer, and the two token ids that every other room needs.

transformers is imported inside the functions, so that importing this module stays cheap.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vcpo.errors import ConfigError
from vcpo.forward import forward_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = [
    "Policy",
    "character_tokenizer",
    "encode_prompt",
    "forward_logits",
    "load_policy",
    "model_fingerprint",
    "save_policy",
    "seeded",
]

INITIALIZATIONS = ("transformers", "torch")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
_SET_ELSEWHERE = {
    "dtype": "policy.dtype",
    "torch_dtype": "policy.dtype",
    "pad_token_id": "the tokenizer",
    "eos_token_id": "the tokenizer",
    "bos_token_id": "the tokenizer",
}
_OLD_SPELLINGS = {"rope_theta", "rope_scaling"}  # transformers still reads them, but no longer lists them


@dataclass
class Policy:
    """A causal language model with its tokenizer; the model is in eval mode (no dropout) unless a caller changes it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int
    """Filler for batches; attention masks, not this id, say what is padding, so it may equal the EOS id."""
    eos_token_id: int
    """Ends a completion; sampling it is an action like any other."""


def load_policy(
    *,
    path: str | Path | None = None,
    architecture: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
    alphabet: str | None = None,
    dtype: str = "float32",
    seed: int = 0,
    initialization: str = "transformers",
) -> Policy:
    """Load a policy from a folder or hub id (`path`), or build one with random weights (`architecture`).

    `architecture` is a model type and its settings: ``{"model_type": "llama", "hidden_size": 64, ...}``; weights are
    drawn under `seed` and torch's global generator is left as found. `tokenizer` is "characters" (with `alphabet`) or
    a folder or hub id; for a `path` it defaults to the one stored there. `initialization` of an architecture:
    "transformers" (the library's, one std for all) or "torch" (embeddings N(0, 1), linear layers by fan-in).
    Raises ConfigError, in one line.
    """
    if initialization not in INITIALIZATIONS:
        raise ConfigError(f"initialization must be one of {', '.join(INITIALIZATIONS)}, got {initialization!r}")
    if (path is None) == (architecture is None):
        raise ConfigError("give the policy a path (folder or hub id) or an architecture, and not both")
    if dtype not in DTYPES:
        raise ConfigError(f"policy dtype {dtype!r} is unknown: it must be one of {', '.join(DTYPES)}")
    if path is not None:
        place = str(path)
        model = _pretrained_model(place, DTYPES[dtype])
        tok = _load_tokenizer(tokenizer if tokenizer is not None else place, alphabet)
    else:
        assert architecture is not None
        if tokenizer is None:
            raise ConfigError('a policy of a new architecture needs a tokenizer: "characters", a folder or a hub id')
        place = f"architecture {architecture.get('model_type', '?')!r}"
        tok = _load_tokenizer(tokenizer, alphabet)
        model = _random_model(architecture, tok, DTYPES[dtype], seed, initialization)
    rows = _embedding_rows(model)
    largest = max(tok.get_vocab().values(), default=-1)
    if largest >= rows:
        raise ConfigError(
            f"tokenizer and model of {place} do not match: token ids go up to {largest}, embeddings to {rows - 1}; "
            "give the tokenizer that the model was trained with"
        )
    pad, eos = _special_ids(tok, model, place)
    return Policy(model=model.eval(), tokenizer=tok, pad_token_id=pad, eos_token_id=eos)


def save_policy(policy: Policy, folder: str | Path) -> None:
    """Write a plain Hugging Face folder (config.json, safetensors, tokenizer) that AutoModelForCausalLM loads."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with _no_progress_bars():
        policy.model.save_pretrained(str(folder))
    policy.tokenizer.save_pretrained(str(folder))


def model_fingerprint(model: torch.nn.Module) -> str:
    """Sixteen hex digits over the names, shapes and dtypes of the parameters; their values do not count."""
    lines = sorted(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character of `alphabet`, after <pad>, <eos> and <unk> (ids 0, 1, 2).

    Encoding and decoding give back every string over the alphabet exactly, "<eos>" written out in letters included:
    text never turns into a special token. Any other character becomes <unk>.
    """
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    twice = sorted({c for c in alphabet if alphabet.count(c) > 1})
    if not alphabet or twice:
        wrong = f"repeats {''.join(twice)!r}" if twice else "is empty"
        raise ConfigError(f"the alphabet of a character tokenizer must list each character once, but it {wrong}")
    if any(0xD800 <= ord(c) <= 0xDFFF for c in alphabet):
        raise ConfigError("the alphabet of a character tokenizer must be valid Unicode, but it holds a lone surrogate")
    vocab = {token: i for i, token in enumerate([PAD, EOS, UNK, *alphabet])}
    backend = Tokenizer(WordLevel(vocab, unk_token=UNK))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a prompt; raises ConfigError if the tokenizer does not know a character of it, or if it is empty."""
    ids = list(tokenizer(text)["input_ids"])
    if not ids:
        raise ConfigError("a prompt is empty: the policy needs at least one token to continue from")
    unk = tokenizer.unk_token_id
    if unk is not None and unk in ids:
        unknown = sorted({c for c in text if unk in tokenizer(c, add_special_tokens=False)["input_ids"]})
        raise ConfigError(
            f"prompt {text[:60]!r} holds {''.join(unknown)[:20]!r}, which the tokenizer does not know: "
            "take the tokenizer or alphabet that goes with the task"
        )
    return ids


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Run a block under torch seed `seed` (CPU, and `device` if it is a GPU), then put the generators back."""
    gpus = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        # Not torch.manual_seed: it reseeds every GPU, and the fork puts back only those it was told of.
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        yield


def _random_model(
    architecture: Mapping[str, Any], tok: PreTrainedTokenizerBase, dtype: torch.dtype, seed: int, initialization: str
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    settings = dict(architecture)
    config_cls = _config_class(settings.pop("model_type", None))
    _check_settings(settings, config_cls)
    ids = {"pad_token_id": tok.pad_token_id, "eos_token_id": tok.eos_token_id, "bos_token_id": tok.bos_token_id}
    settings.setdefault("vocab_size", len(tok))
    try:
        config = config_cls(**settings, **ids)
        with seeded(seed):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", trust_remote_code=False)
            if initialization == "torch":
                _torch_defaults(model)
    except Exception as exc:  # the library validates in many ways; whatever it says is about these settings
        raise ConfigError(f"policy architecture cannot be built: {_one_line(exc)}") from exc
    # Drawn in fp32 and rounded, so that one seed is one policy in every dtype.
    return model.to(dtype)


def _torch_defaults(model: torch.nn.Module) -> None:
    """Embeddings N(0, 1) and linear layers at torch's own scale: fan-in instead of one std for all.

    At a width of 64 the usual std of 0.02 leaves weights so small that an optimizer step of 1e-3 turns the policy over.
    """
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            module.reset_parameters()


def _config_class(model_type: Any) -> type:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if model_type not in known:
        near = _nearest(str(model_type), known)
        raise ConfigError(
            f"policy architecture has unknown model_type {model_type!r}:{near} right is a causal language model that "
            f"transformers knows, such as llama, qwen3, gpt2 or one of {len(known) - 3} more"
        )
    return CONFIG_MAPPING[model_type]


def _check_settings(settings: Mapping[str, Any], config_cls: type) -> None:
    """transformers keeps settings that it does not know in silence: a misspelt one would leave the default in force."""
    known = {*config_cls().to_dict(), *getattr(config_cls, "attribute_map", {}), *_OLD_SPELLINGS}
    for name in settings:
        if name in _SET_ELSEWHERE:
            raise ConfigError(f"policy architecture sets {name!r}, which comes from {_SET_ELSEWHERE[name]}: remove it")
        if name not in known:
            near = _nearest(name, known) or f" see transformers' {config_cls.__name__}"
            raise ConfigError(f"policy architecture has no setting {name!r}:{near}")


def _pretrained_model(place: str, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    _check_place(place, "policy path", "config.json")
    safe: Any = {"trust_remote_code": False, "use_safetensors": True}  # other formats are unpickled
    try:
        with _no_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                place, dtype=dtype, attn_implementation="sdpa", output_loading_info=True, **safe
            )
    except Exception as exc:
        raise ConfigError(f"policy path {place!r} is no causal language model that loads: {_one_line(exc)}") from exc
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(
            f"policy path {place!r} lacks {len(missing)} weights of its model, {missing[0]!r} among them: "
            "save the whole model, else they would be random"
        )
    return model


def _load_tokenizer(tokenizer: str | Path, alphabet: str | None) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    place = str(tokenizer)
    if place == "characters":
        if alphabet is None:
            raise ConfigError('tokenizer "characters" needs an alphabet: take a task that has one, or give a folder')
        return character_tokenizer(alphabet)
    _check_place(place, "tokenizer", "tokenizer_config.json")
    try:
        return AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except Exception as exc:
        raise ConfigError(f"tokenizer of {place!r} cannot be loaded: {_one_line(exc)}") from exc


def _check_place(place: str, what: str, must_hold: str) -> None:
    """A folder that does not exist would be asked for at the hub, with an error about the network."""
    folder = Path(place)
    if folder.is_dir():
        if not (folder / must_hold).is_file():
            raise ConfigError(f"{what} {place!r} is a folder without {must_hold}: give one that save_pretrained wrote")
    elif folder.exists() or place.startswith((".", "/", "~")) or place.count("/") > 1 or "\\" in place:
        raise ConfigError(f"{what} {place!r} is not a folder that exists: give a folder with {must_hold}, or a hub id")


def _special_ids(tok: PreTrainedTokenizerBase, model: PreTrainedModel, place: str) -> tuple[int, int]:
    found: dict[str, int] = {}
    for name, token in (("pad", "<|pad|>"), ("eos", "<|endoftext|>")):
        value = getattr(tok, f"{name}_token_id", None)
        if value is None:
            value = getattr(model.config, f"{name}_token_id", None)
        if isinstance(value, list | tuple):  # several EOS ids: the first one is the usual one
            value = value[0] if value else None
        if value is None:
            raise ConfigError(
                f"tokenizer and model of {place} have no {name} token: set one, for example "
                f"tokenizer.{name}_token = {token!r} (a token it has), then tokenizer.save_pretrained(folder)"
            )
        if not 0 <= int(value) < _embedding_rows(model):
            raise ConfigError(f"{name} token id {value} of {place} is outside the model's vocabulary: set another")
        found[name] = int(value)
    return found["pad"], found["eos"]


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()


def _embedding_rows(model: PreTrainedModel) -> int:
    return model.get_input_embeddings().weight.shape[0]  # type: ignore[index, union-attr]  # an nn.Embedding


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=3)
    return f" did you mean {' or '.join(close)}?" if close else ""


def _one_line(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {' '.join(str(exc).split())[:300]}"
