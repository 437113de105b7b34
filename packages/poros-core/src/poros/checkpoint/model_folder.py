"""From what the user calls a model to a local folder."""

from __future__ import annotations

import os
from pathlib import Path

from poros.errors import CheckpointError, explain

__all__ = ["resolve_model"]

# Everything that reading a model needs and nothing that can run code: no pickles, no Python files.
WEIGHT_FILES = "*.safetensors"
ALLOWED_FILES = (
    WEIGHT_FILES,
    "*.json",
    "*.jinja",
    "*.tiktoken",
    "tokenizer.model",
    "merges.txt",
    "vocab.txt",
)
CONFIG_FILES = ("config.json",)
IGNORED_FILES = ("*/*", "consolidated*", "*.bin.index.json")


def resolve_model(model: str, *, config_only: bool = False, weights: bool = True) -> Path:
    """Return the local folder of a model, downloading it from the hub only if ``model`` cannot be a path.

    A folder that exists is taken as it is, without any network call. So is a missing one refused, if the text looks
    like a path. Everything else is a hub id; the hub's own switches (``HF_HUB_OFFLINE``, ``HF_TOKEN``, ...) hold.

    Args:
        model: folder or hub id.
        config_only: download ``config.json`` alone; the folder need not hold weights.
        weights: False downloads everything but the weights, for whoever only needs the tokenizer.

    Raises:
        CheckpointError: a missing folder, a file instead of a folder, or a hub model that cannot be fetched: it does
            not exist, its licence was not accepted, nobody is logged in, or the hub is out of reach.
    """
    path = Path(model).expanduser()
    try:
        is_folder, exists = path.is_dir() and bool(model), path.exists() and bool(model)
    except OSError as error:  # a parent that may not be entered, a name that is too long
        raise CheckpointError(
            explain("Cannot read a model", expected="a folder", got=error.strerror or error, where=model)
        ) from error
    if is_folder:
        return path
    if exists:
        raise CheckpointError(
            explain(
                "Cannot read a model",
                expected="a folder",
                got="a file",
                where=model,
                next_step="Name its folder",
            )
        )
    if looks_like_path(model):
        raise CheckpointError(
            explain(
                "Cannot read a model",
                expected="a folder that exists, or a hub id like `organisation/model`",
                got="no such folder",
                where=str(path.absolute()) if model else "empty name",
                next_step="Correct the path; nothing was looked up on the network",
            )
        )
    if config_only:
        return _download(model, CONFIG_FILES)
    return _download(
        model, ALLOWED_FILES if weights else tuple(f for f in ALLOWED_FILES if f != WEIGHT_FILES)
    )


def looks_like_path(model: str) -> bool:
    """Say whether a text that names nothing local was meant as a path: a hub id is ``name`` or ``owner/name``."""
    separators = model.count("/") + model.count(os.sep if os.sep != "/" else "\0")
    return (
        not model
        or model.startswith((".", "~", "/", os.sep))
        or model.endswith(("/", os.sep))
        or "\\" in model
        or Path(model).is_absolute()
        or separators > 1
        or (separators == 1 and Path(model).parent.is_dir())
    )


def _download(model: str, files: tuple[str, ...]) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                model, allow_patterns=list(files), ignore_patterns=list(IGNORED_FILES)
            )
        )
    except errors.HFValidationError as error:
        expected, got = "a folder that exists or a hub id", f"{error}"
        next_step = "Correct the name"
    except errors.GatedRepoError:
        expected, got = "access to the hub model", "a refusal: licence not accepted or no login"
        next_step = f"Accept the licence on the page of `{model}`, then log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        expected = "a folder that exists or a hub model that you may read"
        got = "neither: no such model, or a private one and no login"
        next_step = "Correct the name, or log in with `hf auth login`"
    except errors.LocalEntryNotFoundError as error:
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        expected = "the hub, or a complete copy in its cache"
        got = "offline mode and no complete copy" if offline else f"neither: {error.__cause__ or error}"
        next_step = (
            "Unset `HF_HUB_OFFLINE`, or name a local folder"
            if offline
            else "Name a local folder, or try again"
        )
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        refused = status in (401, 403)
        expected = "access to the hub model"
        got = f"HTTP {status}" + (": licence not accepted or no login" if refused else "")
        next_step = "Log in with `hf auth login`" if refused else "Try again, or name a local folder"
    except Exception as error:  # whatever else the network or the disk does
        expected, got = "a download from the hub", f"{type(error).__name__}: {error}"
        next_step = "Name a local folder, or try again"
    raise CheckpointError(
        explain(f"Cannot fetch `{model}`", expected=expected, got=_one_line(got), next_step=next_step)
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
