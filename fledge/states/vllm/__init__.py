"""Hidden states that vLLM computes: the files that it writes, the server that is asked for them, and the source that
training reads.

vLLM's speculative method `extract_hidden_states` keeps hidden states in its KV cache, and its connector
`ExampleHiddenStatesConnector` writes those of a finished request to a file (vLLM 0.26,
`vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py`).
"""
