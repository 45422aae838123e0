"""What a chat template makes of messages: prompts as tokens, each with its author."""
