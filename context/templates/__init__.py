"""Chat templates: messages become prompts of exact tokens, each with its author. Begin with `render`."""
