# SPDX-License-Identifier: Apache-2.0
"""What flash_attn.layers holds that people import: rotary."""
