"""Target models: what training and decoding ask of one (`interface`), and a file for each kind that answers."""
