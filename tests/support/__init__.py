"""What tests share: tiny models and data made here, and the definitions that results are compared with."""
