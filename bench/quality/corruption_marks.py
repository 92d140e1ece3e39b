"""The marks that silent corruption leaves in an answer to an English request without tools.

`marks(text)` names what it saw, one short sentence each; an ordinary answer bears none. Looked for: foreign script and
mojibake; letters of other languages, and the small words of nine European languages; running text with hardly any of
English's small words (a salad of pieces, or another language); stretches of 1 to 60 words in a loop, words doubled,
sentences that come back; floods of one sign; characters that are none, terminal escapes; control tokens and tool-call
markup, whole or cut.

Small words ("the", "nicht", "dans") were chosen over a package for language identification. py3langid 0.4.0 and lingua
2.1.1 tell whole texts of another language as well, but of clauses of 12 German words within 48 English ones few or
none; and a gate must find the same on every machine, installed packages or not: docs/notes/corruption_marks.md.

Not caught: nonsense made of right English sentences, a wrong fact or number; a foreign word now and then that has
neither a letter of its own nor a small word near it ("the Haus"), up to three letters of a foreign script (a quoted
name); a salad in which real small words stand as often as in English; anything but script, characters, tokens, floods
and long loops within fenced code; a loop with less than three turns (six of less than nine words).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence

# --- what an answer is made of

FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,}).*?(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
NOT_PROSE = re.compile(r"`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]+\$|https?://\S+|\S+@\S+", re.DOTALL)
TABLE_ROW = re.compile(r"^[^|\n]*\|.*\|.*$", re.MULTILINE)
WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
AROUND_WORD = ".,;:!?…\"'“”‘’«»„()[]*_-–—"
RUNNING = 5  # words from which on a line is running text, not an item of a list


def code_and_rest(text: str) -> tuple[str, str]:
    """Fenced blocks (one that is cut off included), and everything else."""
    return "\n".join(found.group(0) for found in FENCE.finditer(text)), FENCE.sub("\n", text)


def prose_of(rest: str) -> str:
    """Without table rows, formulas, inline code and addresses."""
    return NOT_PROSE.sub(" ", TABLE_ROW.sub("\n", rest))


def lines_of_words(prose: str) -> Iterator[list[str]]:
    """The words of each line in lower case; names with digits, dots and slashes, and single letters, are none."""
    for line in prose.splitlines():
        tokens = (token.strip(AROUND_WORD) for token in line.replace("—", " ").replace("/", " / ").split())
        words = [token.lower().replace("’", "'") for token in tokens if WORD.fullmatch(token)]
        yield [word for word in words if len(word) > 1 or word in "ai"]


def running_words(prose: str) -> list[str]:
    """The words of all lines that are running text."""
    return [word for words in lines_of_words(prose) if len(words) >= RUNNING for word in words]


def windows(words: Sequence[str], size: int, shortest: int) -> Iterator[Sequence[str]]:
    """Stretches of `size` words, each half over the next; all words where there are fewer, from `shortest` on."""
    if len(words) < shortest:
        return
    for start in range(0, max(1, len(words) - size // 2), size // 2):
        yield words[max(0, min(start, len(words) - size)) : start + size]


# --- scripts

# letters of formulas and units; Greek is looked at apart
OF_FORMULAS = {
    *("ANGSTROM", "BLACK-LETTER", "DOUBLE-STRUCK", "FEMININE", "INFORMATION", "KELVIN", "LATIN", "MASCULINE"),
    *("MATHEMATICAL", "MICRO", "MODIFIER", "OHM", "PLANCK", "SCRIPT", "SUBSCRIPT", "SUPERSCRIPT", "ALEF", "EULER"),
}
FOREIGN_LETTERS = 4  # from here on in any answer: fewer may be a quoted name
FOREIGN_SHARE = 0.01  # of the letters, and at least two
# Greek letters in a row that no formula has: one word of four, or two of three
_GREEK = "[\u0370-\u03ff\u1f00-\u1fff]"
GREEK_WORDS = re.compile(f"{_GREEK}{{4,}}|{_GREEK}{{3}}\\W+{_GREEK}{{3}}")
LATIN = re.compile("[A-Za-z]")
EAST_ASIAN = {"FULLWIDTH", "HALFWIDTH", "IDEOGRAPHIC", "CJK"}  # of punctuation
MOJIBAKE = re.compile("Ã[\u0080-\u00bf]|Â[\u0080-\u00bf]|â€[\u0080-\u00bf™œ“”˜]|â[\u0080-\u009f]")


def script_of(char: str) -> str | None:
    """The script of a letter or of East Asian punctuation that is not of English text or formulas, else None."""
    if char < "\u0250":
        return None
    name = unicodedata.name(char, "UNKNOWN").split()[0]
    if char.isalpha() or unicodedata.category(char) in ("Mn", "Mc"):
        return None if name in OF_FORMULAS or name in ("GREEK", "COMBINING", "VARIATION") else name
    return name if name in EAST_ASIAN else None


def foreign_script(text: str) -> str | None:
    foreign = [place for place, char in enumerate(text) if script_of(char)]
    greek = GREEK_WORDS.search(text)
    if greek:
        foreign += range(*greek.span())
    if not foreign:
        return None
    num_letters = sum(char.isalpha() for char in text)
    # within a Latin word, or as English text's own punctuation: one is enough
    glued = [p for p in foreign if not text[p].isalpha() or LATIN.search(text[max(0, p - 1) : p + 2])]
    many = len(foreign) >= FOREIGN_LETTERS or (len(foreign) >= 2 and len(foreign) > FOREIGN_SHARE * num_letters)
    if not many and not glued:
        return None
    place = (glued or foreign)[0]
    return f"foreign script ({len(foreign)} of {num_letters} letters): {text[max(0, place - 20) : place + 20]!r}"


def stray_letters(text: str) -> int:
    """Letters of a foreign script, however few: a mark or not."""
    return sum(char.isalpha() and script_of(char) is not None for char in text)


def mojibake(text: str) -> str | None:
    found = MOJIBAKE.search(text)
    return f"mojibake: {text[max(0, found.start() - 20) : found.end() + 20]!r}" if found else None


# --- languages


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ENGLISH = _words(
    "a about after again all also am an and any are as at back be because been before being between both but by can "
    "cannot could did do does doing don't down during each even every few first for from get had has have he her here "
    "hers him his how however i if in into is isn't it it's its itself just like may me might more most much must my "
    "need new no nobody not now of off on once one only or other our out over own same see set she should so some "
    "still such than that the their them then there these they this those through to too two under until up upon us "
    "use used using very was we were what when where whether which while who whose why will with within without would "
    "you your"
)
# small words that English text has not, but in a name or two
FOREIGN_WORDS = {
    "German": (
        "aber alle als am an auch auf aus bei beim bis dann das dass dem der des dich diese dieser doch durch ein "
        "eine einem einen einer eines er es etwas für gegen haben hatte ich ihm ihn ihnen ihr ihre immer ist jetzt "
        "kann kein keine können mehr mich mir mit nach nicht niemand noch nur oder ohne sein seine sich sie sind um "
        "und uns unter vom von vor weil wenn werden wie wieder wir wird wurde zu zum zur über"
    ),
    "French": (
        "ainsi alors au aussi autre aux avait avant avec bien c'est ce cela ces cet cette ceux chez comme d'un d'une "
        "dans de depuis des deux dont du elle elles en encore entre est et fait il ils je la le les leur leurs lui "
        "mais mes moi même n'est ne nos notre nous on où par parce pas pendant peut plus pour qu'elle qu'il quand que "
        "quelques qui sans ses si son sont sous toujours tous tout toute très un une vers votre vous à était être"
    ),
    "Spanish": (
        "ahora al algo antes así aunque bien como con cuando cuál del desde donde dos el ella ellos entre era ese eso "
        "esta estaba este esto está están fue hasta hay las lo los me mientras mismo muy más nada ni nos nosotros "
        "nuestro otra otro para pero poco por porque puede que quien qué se ser si sin sobre son su sus también tiene "
        "todo todos tras una uno unos y ya él"
    ),
    "Italian": (
        "alla alle anche che chi ci come con così cui da dal dalla degli dei del della delle dello di dopo dove era "
        "essere fino fra gli ha hanno il io la le lei lo loro lui ma mentre mio molto nei nel nella nelle noi non "
        "nostro ogni per perché però più poi prima quando quella quello questa questo qui sarà senza si solo sono "
        "sotto sua sul sulla suo tra tutti tutto un una uno è"
    ),
    "Portuguese": (
        "ainda além ao aos até com como cujo da das depois dos ela ele eles em entre era essa esse esta este está eu "
        "foi há isso já lhe mais mas mesmo minha muito na nas nem no nos nossa num numa não nós o onde os para pela "
        "pelo pelos pode por porque quando que quem se sem ser seu seus sob sobre sua suas só também tem todos uma "
        "você à às é"
    ),
    "Dutch": (
        "aan al alleen als altijd andere bij dat de deze die dit doen door dus een eerste en er gaan geen haar hebben "
        "heeft het hij hun ik ja je jij kan kunnen maar meer met mijn moet moeten na naar niet niets nog nu of om "
        "omdat onder ons ook op over te tegen toch toen tot uit uw van veel voor waar wat we wel werd wij worden "
        "wordt ze zich zij zijn zo zonder zou"
    ),
    "Swedish": (
        "alla att av bara blev bli blir den denna det detta där efter eller en ett finns från för ha hade han har hon "
        "här icke inga inte jag kan kunde man med men mig mot mycket måste ni nu när någon och också om på sedan sig "
        "sin ska skall som så till under upp ut vad var vara varit vi vid än är över"
    ),
    "Danish or Norwegian": (
        "af alle at av bare blev bli blir da de den denne der det dette dig din disse efter eller en er et etter fra "
        "før han har hun hvad hvis hvor hvordan ikke jeg kan kun kunne man med meg men mig mot må ned noe nogen når "
        "og også om op opp over på selv sig som så til ud under ut var ved vi være å"
    ),
    "Polish": (
        "aby ale bardzo bez być był była było co czy dla do gdy go i ich ja jak jako jego jej jest jeszcze już każdy "
        "kiedy która które który lub ma może można na nad nie niż o od on ona oni po pod przed przez przy się są ta "
        "tak także te tego tej ten to tylko tym w we więc z za ze że żeby"
    ),
}
# of these, what English text has too: words, parts of names, abbreviations; they weigh in a whole window only
ALSO_ENGLISH = _words(
    "a al all als am an as at au av bald ban bare bien bin but by c ce ci com come con da dal dans de del den die dig "
    "din dit do don dos du e el em en end entre er era es ese et even fin fort fra ga go ha had han has hat he her him "
    "his hit hun i il im in is it ja je kan kun la las le lei lo los ma man mas me men mes met mi min mine mir mis mit "
    "most mot na nada ned ni no non nor nos noted nu o of off om on once op or os out over par pas pero plus po pour "
    "qui quo re sa se see sera set si side sin skill so sob sole solo some son sons sous sub sur ta te ten ter to ton "
    "tot tout tu tus um una under uno up ur us van ver vi via vid von war was we wie will y za ze zo z"
)
SMALL_WORDS = {language: _words(words) - ENGLISH for language, words in FOREIGN_WORDS.items()}
TELLING_WORDS = {language: words - ALSO_ENGLISH for language, words in SMALL_WORDS.items()}
LOANWORDS = _words(
    "à café cafés cliché clichés crème crêpe crêpes décor déjà entrée façade façades fiancé fiancée jalapeño maître "
    "matinée mêlée naïve naïveté naïvely né née papier-mâché piñata piqué première protégé purée résumé résumés rôle "
    "sauté sautéed señor smörgåsbord soirée soufflé tête touché über voilà vis-à-vis coöperate coördinate reëlect "
    "doppelgänger gruyère crème brûlée flambé risqué passé blasé chargé communiqué attaché"
)
WINDOW, SHORTEST = 60, 30  # words
LEAST_ENGLISH = 0.10  # of the words in a window of running text are small English words
FOREIGN_OVER = 0.12  # of the words in a window are another language's small words, and more than English ones
TELLING_WINDOW, TELLING, DISTINCT_TELLING = 24, 3, 2  # so many telling words of one language: a clause of it
ELISION = re.compile("(?:c|d|j|l|m|n|qu|s)'[a-zà-ÿ]{3,}")  # French (and Italian): "l'éditeur"
ACCENTED = 4  # different words in lower case with letters that English lacks
FRAGMENTS = _words(
    "ation ations ance ence ence's ency ght ible ical ically ied ies iest ility ing ingly ings ious ish ist ity ively "
    "ization ized izing ledge lessly ments ment ness nesses ological ously ough ought's ould sion sions tain tation "
    "ted ther tic tical ting tion tional tionally tions tious ture tures ually ular ulate ulated ull umption wh "
    "wher whil yth xt ywh str thr shr scr spl squ sch"
)
FRAGMENTS_IN_WINDOW, DISTINCT_FRAGMENTS = 4, 3


def other_language(prose: str) -> str | None:
    words = running_words(prose)
    for window in windows(words, WINDOW, SHORTEST):
        english = sum(word in ENGLISH for word in window) / len(window)
        foreign = {name: sum(word in small for word in window) / len(window) for name, small in SMALL_WORDS.items()}
        name = max(foreign, key=foreign.__getitem__)
        if foreign[name] > FOREIGN_OVER and foreign[name] > english:
            return f"{name}, not English: {' '.join(window[:12])!r}"
    for window in windows(words, TELLING_WINDOW, 1):
        for name, telling in TELLING_WORDS.items():
            hits = [word for word in window if word in telling or (name == "French" and ELISION.fullmatch(word))]
            if len(hits) >= TELLING and len(set(hits)) >= DISTINCT_TELLING:
                return f"{name} words in English text: {', '.join(dict.fromkeys(hits))}"
    accented = {w for w in WORD.findall(prose) if w[0].islower()} - LOANWORDS
    accented = {w for w in accented if any("\u00df" <= c <= "\u024f" for c in w)}
    if len(accented) >= ACCENTED:
        return f"foreign words in English text: {', '.join(sorted(accented)[:6])}"
    return None


def salad(prose: str) -> str | None:
    """Running text with hardly a small English word, or with pieces of words standing alone."""
    words = running_words(prose)
    for window in windows(words, WINDOW, SHORTEST):
        english = sum(word in ENGLISH for word in window)
        if english < LEAST_ENGLISH * len(window):
            return f"no English sentences ({english} small words of {len(window)}): {' '.join(window[:12])!r}"
        pieces = [word for word in window if word in FRAGMENTS]
        if len(pieces) >= FRAGMENTS_IN_WINDOW and len(set(pieces)) >= DISTINCT_FRAGMENTS:
            return f"pieces of words: {', '.join(dict.fromkeys(pieces))} in {' '.join(window[:12])!r}"
    return None


# --- loops and floods

SHORT_LOOP, SHORT_TURNS = 8, 6  # a stretch of up to so many words, so often in a row
LONG_LOOP, LONG_TURNS = 60, 3
CODE_TURNS = 4  # times as many turns in code, which has tables of numbers
NUMBERS = 64  # so many in all where the stretch is numbers alone: lists of zeros are written out
STUTTER_WINDOW, DOUBLED, STUTTER_LAGS, STUTTER_SHARE = 40, 8, range(2, 5), 0.45
SENTENCE_WORDS, SENTENCE_TIMES = 8, 4


RULE_SIGNS = re.escape("-–—=_*~#.+·•─━═█▓▒░▄▀■□<>/\\|^")
# a sign so often in a row; in code, where rules are drawn with any, "!", "?" and what is not ASCII only
FLOOD = re.compile(r"([^\w\s" + RULE_SIGNS + r"'\"(){}\[\]])(?:[\ufe0f\u200d]?\1){7}")
FLOOD_IN_CODE = re.compile(r"([!?]|[^\x00-\u024f\w\s" + RULE_SIGNS + r"])(?:[\ufe0f\u200d]?\1){7}")


def is_wordlike(word: str) -> bool:
    """Has a letter, digit or emoji: not a rule or the bars of a table."""
    return any(char.isalnum() or unicodedata.category(char) == "So" for char in word)


def has_letters(words: Sequence[str]) -> bool:
    """Whether there is more than numbers."""
    return any(char.isalpha() or unicodedata.category(char) == "So" for word in words for char in word)


def loop(words: Sequence[str], patience: int = 1) -> str | None:
    """A stretch of words that follows itself. `patience` multiplies the turns that are too many."""
    for size in range(1, LONG_LOOP + 1):
        turns = (SHORT_TURNS if size <= SHORT_LOOP else LONG_TURNS) * patience
        run = 0
        for index in range(size, len(words)):
            run = run + 1 if words[index] == words[index - size] else 0
            if run < size * (turns - 1):
                continue
            stretch = words[index - size + 1 : index + 1]
            if any(map(is_wordlike, stretch)) and (has_letters(stretch) or run + size >= NUMBERS):
                return f"repetition: {' '.join(stretch)[:120]!r} {turns} times and more"
    return None


def stutter(prose: str) -> str | None:
    """Words doubled, or short stretches twice and twice again, without being one loop."""
    words = running_words(prose)
    for window in windows(words, STUTTER_WINDOW, STUTTER_WINDOW // 2):
        doubled = sum(a == b for a, b in zip(window, window[1:], strict=False))
        if doubled >= DOUBLED:
            return f"repetition: words doubled, {doubled} in {' '.join(window[:12])!r}"
        for lag in STUTTER_LAGS:
            same = sum(a == b for a, b in zip(window, window[lag:], strict=False))
            if same >= STUTTER_SHARE * (len(window) - lag):
                return f"repetition: every {lag} words again in {' '.join(window[:16])!r}"
    return None


def sentences_again(prose: str) -> str | None:
    sentences = [" ".join(running_words(part)) for part in re.split(r"[.!?:;]\s+|\n\s*\n", prose)]
    often = Counter(s for s in sentences if s.count(" ") >= SENTENCE_WORDS - 1)
    for sentence, times in often.most_common(1):
        if times >= SENTENCE_TIMES:
            return f"repetition: the same sentence {times} times: {sentence[:120]!r}"
    return None


STUCK = re.compile(r"([^\W_])\1{31}")
LONG_RULE = re.compile(r"[" + RULE_SIGNS + r"][" + RULE_SIGNS + r" \t]{198,}[" + RULE_SIGNS + r"]")
RULE_LINE = re.compile(r"^[ \t]*(?:[" + RULE_SIGNS + r"] ?){4,}[ \t]*$", re.MULTILINE)
RULE_LINES = re.compile(r"(?:^[ \t]*(?:[" + RULE_SIGNS + r"] ?){8,}[ \t]*\n){4}", re.MULTILINE)
WITHIN_LINE = re.compile(r"[^\W\d_][^\n\w]{0,3}([-=*~#.+·•]{10,})[^\n\w]{0,3}[^\W\d_]")
DENSITY_WINDOW, LEAST_ALNUM = 120, 0.2  # signs that are no spaces
SYMBOLS, SYMBOL_SHARE = 20, 0.025
SYMBOL_RUN = re.compile("(?:[\u2600-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff][\ufe0f\u200d]*){10}")


def flood(text: str, code: str, rest: str) -> str | None:
    """One sign, or a few, instead of words. Rules of up to 200 signs on a line of their own are Markdown."""
    if stuck := STUCK.search(text) or FLOOD.search(rest) or FLOOD_IN_CODE.search(code):
        return f"repetition: {stuck.group(1)!r} {'32' if stuck.group(1).isalnum() else '8'} times"
    if found := SYMBOL_RUN.search(text):
        return f"a flood of signs: {found.group(0)!r}"
    if LONG_RULE.search(text):
        return "a flood of signs: 200 in a row"
    if RULE_LINES.search(rest):
        return "a flood of signs: rule under rule"
    within = [found.group(1) for found in WITHIN_LINE.finditer(rest)]
    if len(within) >= 3 or any(len(run) >= 20 for run in within):
        return f"a flood of signs within a line: {max(within, key=len)[:40]!r}"
    signs = [char for char in RULE_LINE.sub("\n", prose_of(rest)) if not char.isspace()]
    symbols = sum(unicodedata.category(char) == "So" for char in signs)
    if symbols >= SYMBOLS and symbols > SYMBOL_SHARE * len(signs):
        return f"a flood of signs: {symbols} of {len(signs)} are emoji and the like"
    for start in range(0, max(0, len(signs) - DENSITY_WINDOW) + 1, DENSITY_WINDOW // 2):
        window = signs[start : start + DENSITY_WINDOW]
        if len(window) == DENSITY_WINDOW and sum(map(str.isalnum, window)) < LEAST_ALNUM * DENSITY_WINDOW:
            return f"a flood of signs: {''.join(window[:40])!r}"
    bare = "".join(text.split())
    if len(bare) >= 8 and not any(map(str.isalnum, bare)):
        return f"a flood of signs: nothing but {bare[:40]!r}"
    return None


# --- characters, tokens, markup

INVISIBLE = {"\u200b", "\ufeff", "\u2060", *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}
TOKENIZER_MARKS = re.compile(r"[▁Ġ][A-Za-z]|Ċ")
ESCAPE_REMAINS = re.compile(r"\[(?:\d{1,3};)*\d{1,3}m|\[\?\d{1,4}[hl]")
CONTROL = re.compile(
    r"<｜[^｜]*｜>|[｜]|</?think>|<\|/?[A-Za-z][^\n]{0,40}|</?(?:eos|bos|pad|unk)>|</s>|\[/?INST\]|<</?SYS>>|DSML"
)
TAG = re.compile(r"(</?)(?:｜DSML｜|\|DSML\|)(\w+)([^>]*)(>?)")
CALL = re.compile(
    r"</?(?:\w+:)?(?:invoke|tool_calls?|tool_results?|tool_outputs?|function_calls?|function_results?)\b[^>\n]{0,60}"
    r"|</?(?:\w+:)?parameter\s+name\b|</?(?:invok|invo|tool_\w*|function_\w*)$"
)


def broken_characters(text: str) -> str | None:
    def is_none(char: str) -> bool:
        category = unicodedata.category(char)
        if category == "Cn":  # this Python may not know the newest emoji
            return not "\U0001f000" <= char <= "\U0001faff"
        return char == "\ufffd" or category in ("Co", "Cs") or (category == "Cc" and char not in "\n\t\r")

    bad = [char for char in text if is_none(char) or char in INVISIBLE]
    if bad:
        return f"characters that are none: {len(bad)}, the first {bad[0]!r}"
    if re.search(r"\r(?!\n)", text):
        return "characters that are none: a carriage return that overwrites its line"
    if found := TOKENIZER_MARKS.search(text):
        return f"a tokenizer's own mark: {text[max(0, found.start() - 20) : found.end() + 20]!r}"
    remains = ESCAPE_REMAINS.findall(text)
    return f"a terminal escape: {remains[0]!r}" if len(remains) >= 2 else None


def control_tokens(text: str) -> str | None:
    found = CONTROL.search(text)
    return f"a control token in the text: {found.group(0)!r}" if found else None


def broken_markup(text: str) -> str | None:
    """Tool-call markup that is cut or does not balance. None was asked for, so even whole markup is worth a word."""
    open_tags: list[str] = []
    for begin, tag, _, end in TAG.findall(text):
        if not end:
            return f"broken tool-call markup: <{tag} is not closed"
        if begin == "<":
            open_tags.append(tag)
        elif not open_tags or open_tags.pop() != tag:
            return f"broken tool-call markup: </{tag}> closes nothing"
    if open_tags:
        return f"broken tool-call markup: <{open_tags[-1]}> is never closed"
    if found := CALL.search(text.rstrip()):
        return f"tool-call markup though no tool was offered: {found.group(0)!r}"
    return "tool-call markup though no tool was offered" if TAG.search(text) else None


def marks(text: str) -> list[str]:
    """The marks of corruption in an answer to an English request without tools."""
    if not text.strip():
        return ["an empty answer"]
    code, rest = code_and_rest(text)
    prose = prose_of(rest)
    found = [check(text) for check in (foreign_script, mojibake, broken_characters, control_tokens, broken_markup)]
    rows = "\n".join(TABLE_ROW.findall(rest))
    looped = loop(TABLE_ROW.sub("\n", rest).split()) or loop(f"{rows}\n{code}".split(), CODE_TURNS)
    found += [flood(text, code, rest), looped]
    found += [check(prose) for check in (other_language, salad, stutter, sentences_again)]
    return list(dict.fromkeys(mark for mark in found if mark))
