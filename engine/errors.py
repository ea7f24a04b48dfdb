"""The typed errors of the project. Each carries one line that names the cause and the mend."""

from __future__ import annotations


class DraftgateError(Exception):
    """Base of every error that a user can mend; command lines print it as one line and exit with code 2."""


class ModelNotFoundError(DraftgateError, FileNotFoundError):
    """A model name that is neither bundled, a folder, a GGUF file nor reachable on the hub."""

    # OSError's own __str__ would print an errno of None.
    __str__ = Exception.__str__


class ModelFileError(DraftgateError, ValueError):
    """A model file that is truncated, altered or of a kind that cannot be decoded here."""


class UnsupportedModelError(DraftgateError, ValueError):
    """A model whose state cannot be rolled back (recurrent layers), so it cannot verify drafts."""


class TokenizerMismatchError(DraftgateError, ValueError):
    """A target and a drafter that do not share one tokenizer."""


class PromptError(DraftgateError, ValueError):
    """An empty prompt, a prompt beyond the context window, or token ids outside the vocabulary."""


class SamplingError(DraftgateError, ValueError):
    """A sampling or length setting out of its range."""


class SettingError(DraftgateError, ValueError):
    """A setting of an engine or a command out of its range, two that exclude each other, or an exactness mode that a
    model cannot have here."""


class MenuError(DraftgateError, ValueError):
    """A menu entry that cannot be read, or an action that the menu does not hold or masks now."""


class ControllerError(DraftgateError, ValueError):
    """A controller name that is unknown or whose argument is out of range, or an object that cannot choose."""


class DrafterError(DraftgateError, ValueError):
    """A drafter that is unknown, lacks what its contract asks, cannot be told from another, has a setting out of its
    range, or is in a menu but not in the engine."""


class PolicyError(DraftgateError, ValueError):
    """A policy that is missing, truncated, altered, or made for another schema or menu."""


class TraceError(DraftgateError, ValueError):
    """Recorded traces that are missing, truncated, altered, or of another version."""


class NumericalError(DraftgateError, ArithmeticError):
    """Logits of the target that are not finite."""


class DeviceError(DraftgateError, RuntimeError):
    """A device or precision that this machine does not have."""


class WorkloadError(DraftgateError, ValueError):
    """A workload file that cannot be read; the message names the line."""


class StorageError(DraftgateError, OSError):
    """A file that cannot be written, for instance because the disk is full."""

    __str__ = Exception.__str__


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
