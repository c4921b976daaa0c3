"""Kinds of GPUs by their data sheets: what a product of bfloat16 and a read of its memory can reach at best."""

from dataclasses import dataclass

_TERA = 1e12


@dataclass(frozen=True)
class GpuKind:
    """A kind of GPU.

    Attributes:
        name: As nvidia-smi prints it.
        flops: bfloat16 products, flop/s, dense, float32 accumulation.
        memory_bytes: As nvidia-smi reports it, about.
        memory_bytes_s: Rate of its own memory.
        source: Where these figures come from.
    """

    name: str
    flops: float
    memory_bytes: float
    memory_bytes_s: float
    source: str


def _kind(name: str, tera_flops: float, gib: float, tera_bytes_s: float, source: str) -> GpuKind:
    return GpuKind(name, tera_flops * _TERA, gib * 2**30, tera_bytes_s * _TERA, f"NVIDIA's data sheet: {source}")


# A data sheet that gives flop/s "with sparsity" is halved here.
GPU_KINDS = {
    kind.name: kind
    for kind in (
        _kind("NVIDIA B200", 2250, 179, 8.0, "DGX B200 (of 8 GPUs: 72 Pflop/s of sparse FP8, 64 TB/s)"),
        _kind("NVIDIA H200", 989.5, 140, 4.8, "H200 Tensor Core GPU (SXM)"),
        _kind("NVIDIA H100 80GB HBM3", 989.5, 80, 3.35, "H100 Tensor Core GPU (SXM)"),
        _kind("NVIDIA H100 NVL", 835.5, 94, 3.9, "H100 Tensor Core GPU (NVL)"),
        _kind("NVIDIA H100 PCIe", 756, 80, 2.0, "H100 PCIe product brief PB-11133"),
        _kind("NVIDIA A100-SXM4-80GB", 312, 80, 2.039, "A100 80GB SXM"),
        _kind("NVIDIA A100 80GB PCIe", 312, 80, 1.935, "A100 80GB PCIe"),
        _kind("NVIDIA A100-SXM4-40GB", 312, 40, 1.555, "A100 40GB SXM"),
        _kind("NVIDIA L40S", 362, 45, 0.864, "L40S"),
        _kind("NVIDIA RTX A6000", 154.8, 48, 0.768, "RTX A6000"),
        _kind("NVIDIA GeForce RTX 4090", 165.2, 24, 1.008, "Ada GPU architecture white paper"),
        _kind("NVIDIA GeForce RTX 3090", 71, 24, 0.936, "GA102 GPU architecture white paper"),
        _kind("NVIDIA L4", 121, 22.5, 0.3, "L4"),
    )
}
