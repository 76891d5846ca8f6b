"""Features of images and texts.

encoder   encode each image and text once
store     files that hold the features
adapters  models of other libraries, and clipkit's models in MTEB
"""
