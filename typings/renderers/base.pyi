MODEL_RENDERER_MAP: dict[str, str]
