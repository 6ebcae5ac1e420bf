"""Built-in prompts: tasks whose answer repeats much of a text in the prompt, where looking drafts up pays off."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One user message.

    Attributes:
      name: a short label.
      text: the message.
    """

    name: str
    text: str


BUILTIN_PROMPTS = (
    Prompt(
        "copy-edit",
        "Correct the spelling mistakes in the following text and repeat it in full.\n\n"
        "The old lighthouse stands on a narow strip of rock at the edge of the bay. Every evening the keeper "
        "climbs the one hundred and twelve steps to the lamp room, wipes the salt from the windows, and lights the "
        "lamp. In winter the waves reach the lower door, and he has to wait for the tide before he can walk back "
        "to the villige. He has done this for thirty years, and he says that he has never missed a single evening.",
    ),
    Prompt(
        "rewrite",
        "Rewrite the following notice so that the meeting is on Friday instead of Tuesday. Keep everything else.\n\n"
        "Dear residents, the next meeting of the garden committee takes place on Tuesday at seven in the evening "
        "in the community hall. We will talk about the new water tanks, the broken fence along the north path, and "
        "the plan for the spring market. Please bring your membership card and, if you can, a chair. Tea and "
        "biscuits are provided. If you cannot come, leave a note in the box at the gate.",
    ),
    Prompt(
        "summarise",
        "Summarise the following text in two sentences.\n\n"
        "Bread was baked in the village oven once a week. Each family prepared its own dough at home, marked the "
        "loaves with a sign, and carried them to the oven on a long wooden board. The baker fired the oven with "
        "vine cuttings before dawn, and the first loaves went in when the stones had turned white. Families paid "
        "for the baking with firewood or with one loaf in twenty. The custom ended when the first bakery opened in "
        "the main street.",
    ),
    Prompt(
        "rename",
        "Repeat the following Python function and change the tax_rate argument to vat_rate. "
        "Write only the code, no explanation.\n\n"
        "def average_price(items, tax_rate):\n"
        "    total = 0.0\n"
        "    count = 0\n"
        "    for item in items:\n"
        "        if item.price is None:\n"
        "            continue\n"
        "        total += item.price * (1.0 + tax_rate)\n"
        "        count += 1\n"
        "    if count == 0:\n"
        "        return 0.0\n"
        "    return total / count\n",
    ),
    Prompt(
        "extract",
        "Copy the sentences about money from the following news item.\n\n"
        "The museum opened a new wing on Monday. The wing holds forty paintings by local artists, a room with old "
        "maps, and a small library. Visitors can enter for free on the first Sunday of each month. The director "
        "said that the museum had waited eleven years for the money, and she thanked the city and the three "
        "families who gave most of it. A cafe on the roof will open in June.",
    ),
)
"""Our own texts, written for this purpose."""
