"""The folder of the model, the configured one or a hub's copy, and its facts: config, parameters, vocabulary.

They are read from its files without loading the model. An engine may still refuse a folder that passes here.
"""

import ast
import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gspo.common.config.schema import Config, ModelConfig
from gspo.common.errors import InputError
from gspo.common.plain_json import read_json_file

_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_PICKLES = ["*.bin"]
# Mistral's models come a second time in a form of their own.
_SECOND_COPIES = ["consolidated*"]
# Files that the tokenizer and transformers read: a fault of theirs names the file here, before anything starts.
_READ_BY_OTHERS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
# Files that make up a tokenizer of any kind, with the model's config.json, which names the kind.
_TOKENIZER_FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja"),
)
_FIX = "Give a folder that transformers' save_pretrained wrote"
# Size of a parameter in a pickled file, whose header is not read: the smallest that is usual, so that the
# estimate of memory is never too low.
_PICKLED_BYTES = 2
_EMBEDDING, _WEIGHT = "embed_tokens.weight", ".weight"
# safetensors' word.
_BFLOAT16 = "BF16"
# Ends of the names of classes with an output layer over the vocabulary.
_WRITES_TEXT = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
# peft's word for every linear layer but the output.
ALL_LINEAR = "all-linear"
# Embeddings and the output layer.
_NOT_ADAPTED = re.compile(r"(^|\.)(embed_tokens|wte|wpe|lm_head)$")
# A mixture's experts and routers, of which a loaded model holds parameters, not linear layers.
_STACKED = re.compile(r"(\.experts\.\d+\.[^.]+|\.gate)$")
# Of an expert's matrices, those that lie in one parameter.
FUSED = (("gate_proj", "up_proj"), ("w1", "w3"))


def model_folder(model: ModelConfig) -> Path:
    """The folder of the model's files; fetches a hub model once.

    Raises:
        InputError: `model.path` is neither a folder with a sound config.json nor a model that a hub has.
    """
    folder = Path(model.path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            fix = other_folder(folder, "Give a folder that `save_pretrained` wrote, with its tokenizer")
            raise InputError("model.path", f"{folder} has no config.json", fix)
        for name in _READ_BY_OTHERS:
            if (folder / name).exists():
                _read_json(folder / name)
        if not isinstance(_read_json(folder / "config.json").get("model_type"), str):
            rule = f"{folder / 'config.json'} does not say what model it is (model_type)"
            raise InputError("model.path", rule, "Copy it again from the model's source")
        return folder
    if is_path(model.path):
        raise InputError("model.path", f"{model.path} is not a folder", "Correct the path, or give a hub model's name")
    return _from_hub(model.path, _FILES + (_PICKLES if model.allow_pickle else []), key="model.path")


def config_folder(place: str) -> Path:
    """The folder of a model's config.json: of that file, a folder, or a hub's model, of which no weights are fetched.

    Raises:
        InputError: No hub has a model of this name.
    """
    path = Path(place)
    if path.name == "config.json" and path.is_file():
        return path.parent
    return path if path.exists() or is_path(place) else _from_hub(place, ["config.json", "*.py"])


def is_path(place: str) -> bool:
    """Whether a model's place can be a path alone, and no name on a hub."""
    return place.startswith(("/", ".")) or place.count("/") > 1


def other_folder(folder: Path, otherwise: str) -> str:
    """The way to a model from a folder that is none: an adapter's, a run's or that of a hub's cache; or `otherwise`."""
    if (folder / "adapter_config.json").is_file():
        return "It holds a LoRA adapter. Give the folder of a model into which you have merged it (merge_and_unload)"
    inner = sorted(path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/config.json"))
    if inner:
        return f"Give a folder in it that has one, such as {inner[0]}"
    return otherwise


def read_model_config(folder: Path) -> dict[str, Any]:
    """The mapping in a model's config.json; an empty one where it cannot be read."""
    try:
        content = read_json_file(folder / "config.json")
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def max_positions(folder: Path) -> int | None:
    """Tokens that the model of a folder reads, prompt and answer together; None where its config.json names none."""
    facts = read_model_config(folder)
    # Models of several modalities keep the language model's settings one level down.
    inner = facts.get("text_config")
    positions = facts.get("max_position_embeddings")
    if not positions and isinstance(inner, dict):
        positions = inner.get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def check_positions(config: Config, folder: Path) -> None:
    """Refuse rollouts that are longer than the model of a folder reads."""
    longest, known = config.algorithm.longest_branch, max_positions(folder)
    if known is not None and longest > known:
        raise InputError(
            "algorithm.response_length",
            f"prompt_length + response_length = {longest} tokens, and the model ({folder}) reads at most {known}",
            "Lower algorithm.prompt_length or response_length",
        )


def _from_hub(name: str, patterns: list[str], key: str = "") -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=_SECOND_COPIES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            key or name,
            f"{name if key else ''} is not a folder here, and no hub gave it ({reason})".strip(),
            "Give a folder that `save_pretrained` wrote, or a hub name where a hub can be reached",
        ) from error


@dataclass(frozen=True)
class ModelFiles:
    """A model folder.

    Attributes:
        config: config.json.
        num_parameters: Elements of all tensors in the weight files.
        embedding: Shape of the input embedding, [vocabulary, width]; None where it is not found by its usual name.
        highest_token: Largest token id of the tokenizer; None where its vocabulary is in no file that is read here.
        linear: Layer -> shape of its matrix [out, in], of all that can have adapters (LoRA): linear layers, and a
            mixture's routers and experts; empty for a pickle.
        shapes: Tensor -> shape, of all in the weight files; empty for a pickle.
        num_bfloat16: Parameters of linear layers that the files have in bfloat16.
    """

    config: Mapping[str, Any]
    num_parameters: int
    embedding: list[int] | None
    highest_token: int | None
    linear: Mapping[str, list[int]]
    shapes: Mapping[str, list[int]] = field(default_factory=dict)
    num_bfloat16: int = 0


def read_model_files(folder: Path, *, allow_pickle: bool) -> ModelFiles:
    """Read a folder's config.json, the headers of its weight files, and its tokenizer's vocabulary.

    Raises:
        InputError: The folder or a file is missing or broken.
    """
    if not folder.is_dir():
        raise InputError("model.path", f"{folder} is not a folder", _FIX)
    config = _read_json(folder / "config.json")
    num_parameters, tensors = _weights(folder, allow_pickle)
    shapes = {name: shape for name, (shape, _) in tensors.items()}
    embedding = next((shape for name, shape in shapes.items() if name.endswith(_EMBEDDING)), None)
    matrices = {name.removesuffix(_WEIGHT): shape for name, shape in shapes.items() if name.endswith(_WEIGHT)}
    linear = {name: shape for name, shape in matrices.items() if len(shape) == 2 and not _NOT_ADAPTED.search(name)}
    in_bfloat16 = (
        math.prod(shape)
        for name, shape in linear.items()
        if not is_stacked(name) and tensors[name + _WEIGHT][1] == _BFLOAT16
    )
    return ModelFiles(
        config, num_parameters, embedding, _highest_token(folder), linear, shapes, num_bfloat16=sum(in_bfloat16)
    )


def read_tokens(folder: Path) -> dict[str, int]:
    """Token -> id of a folder's tokenizer, special ones included.

    Raises:
        InputError: It has no tokenizer.json, or a broken one.
    """
    tokenizer = _read_json(folder / "tokenizer.json")
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if not isinstance(vocabulary, dict):  # of a unigram model: its tokens with their scores, by id
        vocabulary = {token: number for number, (token, *_) in enumerate(vocabulary)}
    return {**vocabulary, **{added["content"]: added["id"] for added in tokenizer.get("added_tokens", [])}}


def read_added_tokens(folder: Path) -> list[str]:
    """The tokens of a folder's tokenizer that a text is cut at before all others, special ones among them.

    Raises:
        InputError: As `read_tokens`.
    """
    return [added["content"] for added in _read_json(folder / "tokenizer.json").get("added_tokens", [])]


def read_tokenizer_files(model: ModelConfig) -> dict[str, bytes]:
    """The files of a model from which transformers makes its tokenizer.

    Raises:
        InputError: There is no such model, or it has no tokenizer.json.
        OSError: One cannot be read.
    """
    folder = model_folder(model)
    read_tokens(folder)
    return {name: (folder / name).read_bytes() for name in _TOKENIZER_FILES if (folder / name).is_file()}


def is_stacked(layer: str) -> bool:
    """Whether a layer is an expert's or a router: its name in the files is not one in a loaded model."""
    return _STACKED.search(layer) is not None


def is_fused(layer: str) -> bool:
    """Whether a loaded model holds an expert's matrix of this name and another of it as one."""
    return any(layer.rpartition(".")[2] in pair for pair in FUSED)


@cache
def causal_models() -> Mapping[str, str]:
    """Model type -> class that transformers loads as causal language models, by its source: an import takes seconds.

    ModuleNotFoundError without transformers.
    """
    package = importlib.util.find_spec("transformers")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("transformers is not installed", name="transformers")
    source = Path(package.submodule_search_locations[0], "models", "auto", "modeling_auto.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES":
            assert isinstance(node.value, ast.Call)  # noqa: S101 - OrderedDict([(type, class), ...])
            return dict(ast.literal_eval(node.value.args[0]))
    raise LookupError("transformers keeps its causal language models elsewhere")


def refuse_other_model(model: str, facts: Mapping[str, Any], *, trust_remote_code: bool) -> None:
    """Refuse a model of another task than text in causal order; one that brings its own code passes.

    Raises:
        InputError: Names its type or its classes, by its config.json.
    """
    if "auto_map" in facts and trust_remote_code:
        return
    kind = facts.get("model_type")
    known = causal_models().get(kind) if isinstance(kind, str) else None
    parts = [facts, *(part for part in facts.values() if isinstance(part, dict))]
    has_media = any(isinstance(part.get(f"{sense}_config"), dict) for part in parts for sense in ("vision", "audio"))
    if has_media and known is None:
        rule = f"{model} is a model of type {kind!r} for images or sound beside text, and gspo trains text alone"
        raise InputError("model.path", rule, "Take a model of text, such as Qwen3")
    if known is None:
        raise InputError(
            "model.path",
            f"{model} is a model of type {kind!r}, which the installed transformers does not know as a "
            "causal language model",
            "Take another model, or a newer transformers; set model.trust_remote_code where it comes with Python code",
        )
    classes = facts.get("architectures")
    names = [str(name) for name in classes] if isinstance(classes, list) else []
    if names and not any(name.endswith(_WRITES_TEXT) or name in causal_models().values() for name in names):
        rule = f"{model} is a {', '.join(names)} (architectures of its config.json), which writes no text"
        raise InputError("model.path", rule, f"Take the model whose class is {known}")


def refuse_quantized(model: str, facts: Mapping[str, Any]) -> None:
    """Refuse quantized weights: they have no gradient, and a push would not have their names.

    Raises:
        InputError: Names the method, by the model's config.json.
    """
    quantized = facts.get("quantization_config")
    if not isinstance(quantized, dict) or not (method := quantized.get("quant_method")):
        return
    fix = "Take the model's unquantized weights"
    if method == "mxfp4":
        fix = (
            "Convert it once: AutoModelForCausalLM.from_pretrained(FOLDER, quantization_config="
            "Mxfp4Config(dequantize=True), dtype='bfloat16').save_pretrained(OTHER), with the tokenizer"
        )
    raise InputError(
        "model.path", f"{model} holds quantized weights ({method}, by its quantization_config): they do not train", fix
    )


def _weights(folder: Path, allow_pickle: bool) -> tuple[int, dict[str, tuple[list[int], str]]]:
    """Elements of all tensors, and shape and dtype of each by its name; only the elements for a pickle."""
    if safe := weight_files(folder):
        tensors = {name: tensor for path in safe for name, tensor in _safetensors_heads(path).items()}
        return sum(math.prod(shape) for shape, _ in tensors.values()), tensors
    pickled = sorted(folder.glob("pytorch_model*.bin"))
    if pickled and allow_pickle:
        return sum(path.stat().st_size for path in pickled) // _PICKLED_BYTES, {}
    if pickled:
        raise InputError(
            "model.path",
            f"{folder} has its weights in {pickled[0].name}, a pickle, which can run code when it is loaded",
            "Convert it to safetensors, or set model.allow_pickle: true if you trust it",
        )
    raise InputError("model.path", f"{folder} has no weights (*.safetensors)", _FIX)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that both engines read: those of the index, or all; sorted, and none for a pickle.

    Raises:
        InputError: A file is missing, or the engines would read different ones. transformers prefers the file
            model.safetensors, vLLM the index; without an index vLLM reads every file.
    """
    files, index = sorted(folder.glob("*.safetensors")), folder / "model.safetensors.index.json"
    named = _read_json(index).get("weight_map") if index.exists() else None
    by_vllm = [folder / name for name in sorted(set(named.values()))] if isinstance(named, dict) else files
    for file in by_vllm:
        if not file.is_file():
            raise InputError("model.path", f"{folder}: {index.name} names {file.name}, which is missing", _FIX)
    single = folder / "model.safetensors"
    if single in files and by_vllm != [single]:
        other = next(file.name for file in by_vllm if file != single)
        raise InputError(
            "model.path",
            f"{folder} holds {single.name} beside {other}: the learner would read the first alone, and vLLM "
            f"{'both' if single in by_vllm else f'the files of {index.name}'}",
            "Remove one of the two from the folder",
        )
    return by_vllm


def _safetensors_heads(path: Path) -> dict[str, tuple[list[int], str]]:
    """Shapes and dtypes, such as BF16, by name."""
    from safetensors import SafetensorError, safe_open  # here: the image of the reward service reads no weights

    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise InputError("model.path", f"{path} is not a whole safetensors file ({error})", "Copy it again") from error


def _highest_token(folder: Path) -> int | None:
    path = folder / "tokenizer.json"
    if not path.exists():
        if any((folder / name).exists() for name in ("tokenizer.model", "vocab.json", "vocab.txt", "tokenizer.py")):
            return None
        raise InputError("model.path", f"{folder} has no tokenizer", "Save the model's tokenizer to the same folder")
    return max(read_tokens(folder).values(), default=None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json_file(path)
    except FileNotFoundError as error:
        raise InputError("model.path", f"{path} is missing", _FIX) from error
    except (OSError, ValueError) as error:
        raise InputError("model.path", f"{path} cannot be read ({error})", "Copy it again") from error
    if not isinstance(content, dict):
        raise InputError("model.path", f"{path} is not a JSON object", "Copy it again")
    return content
