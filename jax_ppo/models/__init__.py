"""The Qwen decoder: layers, attention, actor and critic, and conversion from and to Hugging Face."""
