"""What flash_attn.layers holds that people import: rotary."""
