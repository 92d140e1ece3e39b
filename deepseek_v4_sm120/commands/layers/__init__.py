"""`layers`: whether a running server computes the model, layer by layer, beside float64 from the checkpoint's files.

asking      what the server is asked, and the file by which it is told to record
record      what it recorded: whole, of these requests, or not to be judged
checkpoint  the tensors of the checkpoint's files, read when they are needed
kept        its weights and their products, as long as a sublayer is judged
judge       each sublayer's error, and each known fault's share in it
chain       what EAGLE's drafts are given, and what becomes of their guesses, from pass to pass
groups      what is added up: errors, what rounding makes of them, shares of faults, heads, experts, pages
tokens      whether the tokens that it went on with are those that its rows say
verdict     what that says of the engine
"""
