"""Layer specs for Megatron's TransformerBlock, with TransformerEngine or without."""

import functools
from typing import Literal

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import ExpertsBuilder, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import LayerNormBuilder
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MlpBuilder,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from loongplug.models.layers.attention import RotarySelfAttention, SDPAttention
from loongplug.models.layers.context.attention import ContextAttention
from loongplug.models.layers.context.engine import over_parts_of_rows
from loongplug.models.layers.linear import (
    DelayedColumnParallelLinear,
    DelayedRowParallelLinear,
    LocalColumnParallelLinear,
    LocalRowParallelLinear,
)
from loongplug.models.layers.mlp import ExpertLayer, LocalExperts, LocalMLP, LocalSharedExperts
from loongplug.models.layers.norm import LayerNorm, RMSNorm
from loongplug.models.layers.router import BalancedRouter

Backend = Literal["te", "local"]


class SDPASpecProvider(LocalSpecProvider):
    """Upstream's local backend with this package's attention, norms and linears.

    With ``delayed``, the latter leave their weights' gradients to a schedule; with ``split_rows``
    the ranks of a context parallel group share each row.
    """

    def __init__(self, *, delayed: bool = False, split_rows: bool = False) -> None:
        self._delayed = delayed
        self._split_rows = split_rows

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> LayerNormBuilder:
        """The norm class; q/k norms and norms before a residual are no different."""
        return RMSNorm if rms_norm else LayerNorm

    def column_parallel_linear(self) -> type:
        """The column-parallel linear class."""
        return DelayedColumnParallelLinear if self._delayed else LocalColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """The row-parallel linear class."""
        return DelayedRowParallelLinear if self._delayed else LocalRowParallelLinear

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> ExpertsBuilder:
        """The experts of a layer, sequential: a grouped GEMM needs TransformerEngine."""
        if moe_use_grouped_gemm:
            raise ValueError(
                "moe_grouped_gemm needs TransformerEngine, and the backend is 'local': leave it "
                "unset."
            )
        return functools.partial(LocalExperts, submodules=_linears(self))

    def core_attention(self) -> type:
        """The core attention class."""
        return ContextAttention if self._split_rows else SDPAttention


class SplitRowsTESpecProvider(TESpecProvider):
    """Upstream's TransformerEngine backend where the ranks of a context parallel group share rows.

    All but attention works on tokens, wherever they are of a row.
    """

    def core_attention(self) -> type:
        """The core attention class."""
        return over_parts_of_rows(super().core_attention())


def decoder_layer_spec(
    config: TransformerConfig,
    *,
    backend: Backend,
    layer_class: type[TransformerLayer] = TransformerLayer,
) -> ModuleSpec:
    """A causal decoder layer; q/k norm, gated MLP or experts as ``config`` says.

    Layers take ``rotary_pos_emb`` as made by ``rope_table``. With ``delay_wgrad_compute`` their
    backward computes no gradients of linears' weights: a schedule asks for them. With context
    parallelism, ``packed_seq_params`` have to carry the row (see ContextAttention).
    """
    provider = _provider(
        backend,
        delayed=config.delay_wgrad_compute,
        split_rows=config.context_parallel_size > 1,
    )
    return _layer_spec(config, AttnMaskType.causal, provider=provider, layer_class=layer_class)


def vision_layer_spec(
    config: TransformerConfig,
    *,
    backend: Backend,
    layer_class: type[TransformerLayer] = TransformerLayer,
) -> ModuleSpec:
    """An encoder layer with full attention within each packed segment.

    Layers take ``packed_seq_params`` as made by ``pack_segments`` and ``rotary_pos_emb`` as made
    by ``rope_table``.
    """
    provider = _provider(backend)
    return _layer_spec(config, AttnMaskType.no_mask, provider=provider, layer_class=layer_class)


def final_norm(config: TransformerConfig, backend: Backend) -> LayerNormBuilder:
    """The norm after the last layer, for ``TransformerBlockSubmodules.layer_norm``."""
    return _provider(backend).layer_norm(rms_norm=_is_rms(config))


def _layer_spec(
    config: TransformerConfig,
    mask: AttnMaskType,
    *,
    provider: BackendSpecProvider,
    layer_class: type[TransformerLayer],
) -> ModuleSpec:
    fused = provider.fuse_layernorm_and_linear()
    norm = provider.layer_norm(rms_norm=_is_rms(config), has_residual=True)
    qk_norm = provider.layer_norm(rms_norm=_is_rms(config), for_qk=True)
    attention = SelfAttentionSubmodules(
        linear_qkv=(
            provider.column_parallel_layer_norm_linear()
            if fused
            else provider.column_parallel_linear()
        ),
        core_attention=provider.core_attention(),
        linear_proj=provider.row_parallel_linear(),
        q_layernorm=qk_norm if config.qk_layernorm else IdentityOp,
        k_layernorm=qk_norm if config.qk_layernorm else IdentityOp,
    )
    dense = config.num_moe_experts is None
    submodules = TransformerLayerSubmodules(
        input_layernorm=IdentityOp if fused else norm,
        self_attention=ModuleSpec(
            module=RotarySelfAttention, params={"attn_mask_type": mask}, submodules=attention
        ),
        self_attn_bda=get_bias_dropout_add,
        # Only a dense MLP's first linear has the norm inside it.
        pre_mlp_layernorm=IdentityOp if fused and dense else norm,
        mlp=_mlp(config, provider),
        mlp_bda=get_bias_dropout_add,
        # Checkpoints carry the fused names either way, so that they move between backends.
        sharded_state_dict_keys_map={} if fused else _fused_names(dense=dense),
    )
    return ModuleSpec(module=layer_class, submodules=submodules)


def _mlp(config: TransformerConfig, provider: BackendSpecProvider) -> MlpBuilder:
    local = isinstance(provider, SDPASpecProvider)
    if config.num_moe_experts is not None:
        experts = provider.grouped_mlp_modules(config.moe_grouped_gemm)
        shared = functools.partial(
            LocalSharedExperts if local else SharedExpertMLP, submodules=_linears(provider)
        )
        return functools.partial(
            ExpertLayer,
            submodules=MoESubmodules(experts=experts, router=BalancedRouter, shared_experts=shared),
        )
    if local:
        return functools.partial(LocalMLP.as_mlp_submodule, submodules=_linears(provider))
    return get_mlp_module_spec_for_backend(backend=provider)


def _linears(provider: BackendSpecProvider) -> MLPSubmodules:
    return MLPSubmodules(
        linear_fc1=provider.column_parallel_linear(),
        linear_fc2=provider.row_parallel_linear(),
        activation_func=provider.activation_func(),
    )


def _fused_names(*, dense: bool) -> dict[str, str]:
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if dense:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names


def _provider(
    backend: Backend, *, delayed: bool = False, split_rows: bool = False
) -> BackendSpecProvider:
    if backend == "local":
        return SDPASpecProvider(delayed=delayed, split_rows=split_rows)
    if not HAVE_TE:
        raise ValueError(
            "backend is 'te', but transformer_engine cannot be imported here: install it "
            "(pip install --no-build-isolation '.[gpu]' in the checkout) or use 'local'."
        )
    return SplitRowsTESpecProvider() if split_rows else TESpecProvider()


def _is_rms(config: TransformerConfig) -> bool:
    return bool(config.normalization == "RMSNorm")
