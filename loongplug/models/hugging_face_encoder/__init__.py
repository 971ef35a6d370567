"""Any image encoder of the installed ``transformers``, as it is: whole on a rank, never split."""

from loongplug.models.hugging_face_encoder.config import HuggingFaceEncoderConfig
from loongplug.models.parts import ANY_TYPE, Part

LOONGPLUG_PARTS = (
    Part(
        name="hugging_face",
        config_class=HuggingFaceEncoderConfig,
        build="loongplug.models.hugging_face_encoder.encoder:build_encoder",
        hugging_face="loongplug.models.hugging_face_encoder.hf:encoder",
        derived="loongplug.models.hugging_face_encoder.hf:settings_of",
        model_type=ANY_TYPE,
    ),
)
