"""The torch runtime: any encoder that transformers supports, on CPUs and GPUs, also in half precision and compiled."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from weir.errors import SettingsError, add_extra
from weir.model import take_any_shape
from weir.text_models import WITH_CLASSIFIER, WITH_HEAD, ComputingSettings, Pooling, Precision, Recipe, WorkerShare
from weir.text_models.recipe import dense_layers, dimensions_of, quantizes
from weir.text_models.runtime import CPU, Inputs, Pixels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weir.text_models.checkpoint.heads import Dense
    from weir.text_models.checkpoint.reading import Checkpoint

DTYPES = {Precision.FP32: "float32", Precision.FP16: "float16", Precision.BF16: "bfloat16"}
# Parameters with such a part in their name encode positions in the models of transformers.
POSITION_PARAMETERS = ("position_embedding", "relative_attention_bias")
# The classes of the towers for texts and for images, and the output that is the vector.
TOWERS = {
    "clip": (("CLIPTextModelWithProjection", "text_embeds"), ("CLIPVisionModelWithProjection", "image_embeds")),
    "siglip": (("SiglipTextModel", "pooler_output"), ("SiglipVisionModel", "pooler_output")),
}
LEAST_WEIGHT = 1e-9  # the least divisor of a mean, so that a text without any counted token becomes zeros


def pool_all(torch: Any, value: Any, mask: Any, pool: Any, recipe: Recipe) -> Any:
    """Return the results of all poolings of `recipe`, concatenated in each vector: float32 [texts, dimensions].

    `value` is float32 [texts, length, size]. `mask` and `pool` [texts, length] are those of Runtime.run.
    """
    results = [pool_one(torch, value, mask, pool, pooling, recipe.window) for pooling in recipe.poolings]
    return results[0] if len(results) == 1 else torch.cat(results, dim=-1)


def pool_one(torch: Any, value: Any, mask: Any, pool: Any, pooling: Pooling, window: int) -> Any:
    """Return the result of one pooling; [texts, length, size] for Pooling.NONE."""
    weights = pool.unsqueeze(-1)
    if pooling is Pooling.NONE:
        return value * weights
    if pooling is Pooling.CLS:
        return value[:, 0]
    if pooling is Pooling.SEP:
        return value[torch.arange(len(value), device=value.device), mask.sum(dim=1) - 1]
    if pooling is Pooling.MAX:
        return _highest(value, weights)
    if pooling is Pooling.MEAN_MAX:
        return torch.cat([_mean(value, weights), _highest(value, weights)], dim=-1)
    if pooling is Pooling.HIERARCHICAL:
        return _hierarchical(torch, value, weights, window)
    if pooling is Pooling.WEIGHTED_MEAN:
        return _mean(value, weights * weights.cumsum(dim=1))
    return _mean(value, weights, root=pooling is Pooling.MEAN_SQRT)


def activate(torch: Any, value: Any, activation: str) -> Any:
    """Return `value` after the activation with this name: identity, tanh, relu, gelu or sigmoid."""
    if activation == "identity":
        return value
    return torch.nn.functional.gelu(value) if activation == "gelu" else getattr(torch, activation)(value)


def _mean(value: Any, weights: Any, root: bool = False) -> Any:
    count = weights.sum(dim=1).clamp(min=LEAST_WEIGHT)
    return (value * weights).sum(dim=1) / (count.sqrt() if root else count)


def _hierarchical(torch: Any, value: Any, weights: Any, window: int) -> Any:
    """Return the maximum of the means over each window that is full, or that holds all tokens of a shorter text."""
    sums, counts = _in_windows(torch, value * weights, window), _in_windows(torch, weights, window)
    enough = weights.sum(dim=1, keepdim=True).clamp(max=window) / window - 0.5 / window
    return _highest(sums / counts.clamp(min=LEAST_WEIGHT), (counts > enough.clamp(min=LEAST_WEIGHT)).float())


def _in_windows(torch: Any, value: Any, window: int) -> Any:
    padded = torch.nn.functional.pad(value.transpose(1, 2), (0, window - 1))
    return torch.nn.functional.avg_pool1d(padded, window, stride=1).transpose(1, 2)


def _highest(value: Any, weights: Any) -> Any:
    counts = weights > 0
    highest = value.masked_fill(~counts, float("-inf")).amax(dim=1)
    return highest.masked_fill(~counts.any(dim=1), 0.0)


def library() -> Any:
    """Return the package torch. Raises SettingsError, with the command that installs them, if torch or transformers is not installed."""
    try:
        import torch
        import transformers
    except ImportError:
        raise SettingsError(f"runtime='torch': needs torch and transformers; {add_extra('torch')}") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return torch


def gpu_memory() -> Sequence[int]:
    """Return the free memory, in bytes, of each GPU that torch can use."""
    cuda = library().cuda
    return [int(cuda.mem_get_info(gpu)[0]) for gpu in range(cuda.device_count())] if cuda.is_available() else []


def open_torch(
    checkpoint: "Checkpoint", recipe: Recipe, computing: ComputingSettings, share: WorkerShare, device: str
) -> "TorchRuntime":
    """Load the network of `checkpoint` on `device`. See open_runtime."""
    if recipe.precision not in DTYPES:
        raise SettingsError(f"precision={recipe.precision.value!r}: the torch runtime has fp32, fp16 and bf16")
    if recipe.pooling in WITH_HEAD:
        raise SettingsError(f"pooling={recipe.pooling.value!r}: the onnx runtime alone computes it: set runtime onnx")
    dimensions = dimensions_of(checkpoint, recipe)
    torch = library()
    torch.set_num_threads(share.threads)
    take_any_shape(torch)
    if device != CPU and computing.gpu_memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(computing.gpu_memory_fraction, device)
    network = _network(checkpoint, recipe).to(device, getattr(torch, DTYPES[recipe.precision])).eval()
    call = torch.compile(network, dynamic=True) if computing.compile else network
    return TorchRuntime(torch, call, checkpoint, recipe, device, dimensions)


def _network(checkpoint: "Checkpoint", recipe: Recipe) -> Any:
    """Load the network of the directory with transformers. Code in the directory is not run, and nothing is downloaded.

    Pickles are read only if the checkpoint allows it, and of them only tensors (weights_only).
    """
    import transformers

    classifies = recipe.pooling in WITH_CLASSIFIER
    kind = transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModel
    directory, tower = str(checkpoint.layout.network), dict[str, Any]()
    try:
        if (
            recipe.pooling is Pooling.PROJECTION
        ):  # one tower alone, whose configuration need not state the size of the space
            kind = getattr(transformers, TOWERS[checkpoint.architecture.family][recipe.images][0])
            whole = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
            tower["config"] = whole.vision_config if recipe.images else whole.text_config
            tower["config"].projection_dim = checkpoint.architecture.projection_size
        network = kind.from_pretrained(
            directory,
            **tower,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=None if checkpoint.allow_pickle else True,
            weights_only=True,
        )
    except (
        OSError,
        ValueError,
    ) as error:  # an unknown architecture, an architecture with code of its own, or broken files
        raise SettingsError(f"{checkpoint.directory}: transformers does not read it: {error}") from error
    for name, weight in network.named_parameters():
        if not weight.isfinite().all():
            raise SettingsError(
                f"{checkpoint.directory}: {name!r} has a weight that is NaN or infinite: the file is broken"
            )
        if not recipe.positions and any(part in name for part in POSITION_PARAMETERS):
            weight.data.zero_()
    return network


class _DenseTensors(NamedTuple):
    """A Dense whose arrays are on the device."""

    weight: Any
    bias: Any
    activation: str
    residual: Any


class TorchRuntime:
    """A network of transformers, followed by pooling, dense layers and normalization; see Runtime."""

    def __init__(
        self, torch: Any, network: Any, checkpoint: "Checkpoint", recipe: Recipe, device: str, dimensions: int
    ) -> None:
        self.device = device
        self.dimensions = dimensions
        self._torch = torch
        self._network = network
        self._recipe = recipe
        self._projected = (
            TOWERS[checkpoint.architecture.family][recipe.images][1] if recipe.pooling is Pooling.PROJECTION else ""
        )
        self._has_types = checkpoint.architecture.type_vocab_size > 1
        self._dense = self._on_device(dense_layers(checkpoint, recipe))
        self._quantizes = quantizes(checkpoint, recipe)
        heads = {Pooling.SPARSE: checkpoint.heads.weights, Pooling.TOKENS: checkpoint.heads.tokens}
        self._heads = {
            pooling: self._on_device(head.layers)
            for pooling, head in heads.items()
            if head is not None and pooling in recipe.further
        }

    def _on_device(self, layers: "Sequence[Dense]") -> list[_DenseTensors]:
        return [
            _DenseTensors(
                self._tensor(layer.weight),
                None if layer.bias is None else self._tensor(layer.bias),
                layer.activation,
                None if layer.residual is None else self._tensor(layer.residual),
            )
            for layer in layers
        ]

    def _through(self, layers: Sequence[_DenseTensors], value: Any) -> Any:
        linear = self._torch.nn.functional.linear
        for weight, bias, activation, residual in layers:
            out = activate(self._torch, linear(value, weight, bias), activation)
            value = out if residual is None else out + linear(value, residual)
        return value

    def widened(self, threads: int) -> None:
        """See Runtime. Torch has one number of threads for a process."""

    def run(self, inputs: Inputs | Pixels, poolings: Sequence[Pooling] = ()) -> "list[NDArray[Any]]":
        """See Runtime."""
        with self._torch.inference_mode():
            if isinstance(inputs, Pixels):
                pixels = self._tensor(inputs.pixels).to(self._network.dtype)
                read, _ = self._run_network({"pixel_values": pixels})
                return [self._own(read, None, None, None).cpu().numpy()]
            ids, mask, types, pool = map(self._tensor, inputs)
            given = {"input_ids": ids.long(), "attention_mask": mask.long()}
            if self._has_types:
                given["token_type_ids"] = types.long()
            read, value = self._run_network(given)
            results = []
            for pooling in poolings or (self._recipe.pooling,):
                further = pooling in self._recipe.further
                found = self._further(value, pooling) if further else self._own(read, value, mask, pool)
                results.append(found.cpu().numpy())
            return results

    def _own(self, read: Any, value: Any, mask: Any, pool: Any) -> Any:
        """Return the result of the recipe. `read` is what the model's own head made of a text, None if there is no such."""
        torch, pooling = self._torch, self._recipe.pooling
        if pooling in WITH_CLASSIFIER and pooling is not Pooling.LOGITS:
            read = read.sigmoid() if pooling is Pooling.REGRESSION else read.softmax(dim=-1)
        if read is None:
            read = pool_all(torch, value, mask, pool, self._recipe)
        read = self._through(self._dense, read)
        if self._quantizes:
            read = (read.tanh() * 127).round()
        if self._recipe.dimensions is not None:
            read = read[..., : self._recipe.dimensions]
        return torch.nn.functional.normalize(read, dim=-1) if self._recipe.normalize else read

    def _further(self, value: Any, pooling: Pooling) -> Any:
        """Return what an additional pooling makes of the tokens."""
        if pooling is Pooling.NONE:
            return value
        found = self._through(self._heads[pooling], value)
        return found.relu() if pooling is Pooling.SPARSE else self._torch.nn.functional.normalize(found, dim=-1)

    def _run_network(self, inputs: dict[str, Any]) -> tuple[Any, Any]:
        """Run the network. Return what its own head makes of each text, None without a head, and what is pooled, None behind a classifier."""
        pooling, layers = self._recipe.pooling, self._recipe.layers
        if pooling in WITH_CLASSIFIER:
            return self._network(**inputs).logits.float(), None
        if pooling is Pooling.PROJECTION:
            return self._network(**inputs)[self._projected].float(), None
        if pooling is Pooling.POOLER or layers == (-1,):
            out = self._network(**inputs)
            return out.pooler_output.float() if pooling is Pooling.POOLER else None, out.last_hidden_state.float()
        states = self._network(**inputs, output_hidden_states=True).hidden_states
        return None, self._torch.cat([states[layer] for layer in layers], dim=-1).float()

    def _tensor(self, array: "NDArray[Any]") -> Any:
        return self._torch.from_numpy(array.copy()).to(self.device)
