"""The operations of layers by the kernels of training, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fledge.drafts.layers import MLP, Compute, Layer, Linear, RMSNorm, Rotation
from fledge.ops.training import GradientSums, SharedProducts, linear_products, swiglu


@dataclass(frozen=True)
class FusedCompute(Compute):
    """`Compute` by kernels, which save fewer activations; modules with biases stay in plain torch. With `gradients`,
    the kernels add the weights' gradients there; None leaves them to autograd."""

    gradients: GradientSums | None = None

    def products(self, x: Tensor, *projections: Linear) -> tuple[Tensor, ...]:
        """See `Compute.products`."""
        if projections[0].bias is not None:
            return super().products(x, *projections)
        return linear_products(x, *(p.weight for p in projections), gradients=self.gradients)

    def add_product(self, x: Tensor, projection: Linear, residual: Tensor) -> Tensor:
        """See `Compute.add_product`."""
        if projection.bias is not None:
            return super().add_product(x, projection, residual)
        return linear_products(x, projection.weight, residual_SO=residual, gradients=self.gradients)[0]

    def norm(self, norm: RMSNorm, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Compute.norm`."""
        from fledge.ops.training_triton import norm_with_input

        return norm_with_input(x, norm.weight, norm.eps)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """See `Compute.rotate`."""
        from fledge.ops.training_triton import rope

        return rope(x, *rotation)

    def mlp(self, mlp: MLP, x: Tensor, residual: Tensor) -> Tensor:
        """See `Compute.mlp`."""
        if mlp.gate_proj.bias is not None:
            return super().mlp(mlp, x, residual)
        weights = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
        return swiglu(x, *weights, residual, recompute=self.recompute, gradients=self.gradients)

    def share(self, layer: Layer, embedded_NE: Tensor) -> SharedProducts | None:
        """See `Compute.share`; None for projections with biases."""
        attention = layer.self_attn
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        if attention.q_proj.bias is not None:
            return None
        weights = (p.weight for p in projections)
        return SharedProducts(layer.input_layernorm(embedded_NE), *weights, gradients=self.gradients)
