"""How a step becomes graphs. Today by regions: one per graph that Dynamo hands over.

``session`` is what one ``torch.compile`` call keeps, ``regions`` compiles a graph, ``dynamo_api``
and ``graph_inputs`` are where private interfaces of Dynamo are touched. Whole-step capture will
stand beside ``regions``.
"""
