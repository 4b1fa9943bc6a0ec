/* The conversation: the composer, the log, one stream at a time. A chat sends its whole history; a completion and an
 * example stand alone. Fed by main.js with snapshots for the lines below the answers. */

import { ApiError } from "./api.js";
import { Burst } from "./burst.js";
import { Attachments, contentOf } from "./images.js";
import { AssistantMessage, userMessage } from "./message.js";
import { setText } from "./svg.js";

const EXAMPLE_TOKENS = 600;
/** So near to the end of the log new text scrolls it along, in pixels. */
const NEAR_END = 80;

export class Chat {
  #api;
  #ui;
  #attachments;
  /** Messages of the exchanges that ended well, as the API takes them. */
  #history = [];
  /** The example in the prompt box: {prompt, value}. */
  #example = null;
  /** Ends what streams; null while nothing does. */
  #abort = null;
  /** Answers whose trace is still open or may be looked at: AssistantMessage or Burst. */
  #traced = [];
  #modelName = null;
  /** What this model may be asked first, see `chitu/protocol/first_prompt.py`. */
  #firstPrompt = null;

  /** @param ui elements by name, see main.js */
  constructor(api, ui) {
    this.#api = api;
    this.#ui = ui;
    this.#attachments = new Attachments(ui);
    ui.composer.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    ui.prompt.addEventListener("keydown", (event) => {
      // An input method uses Enter to choose a candidate.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#stop();
    });
    ui.stop.addEventListener("click", () => {
      this.#stop();
      ui.prompt.focus();
    });
    ui.clear.addEventListener("click", () => this.#clear());
    for (const button of ui.examples) button.addEventListener("click", () => this.#offerExample());
    ui.first.addEventListener("click", () => this.#offer(this.#firstPrompt.text, this.#firstPrompt.is_chat));
    for (const button of ui.bursts) button.addEventListener("click", () => this.#runBurst());
  }

  /** The traces of answers; the name that requests must give, and a first one. */
  observe(snapshot) {
    this.#modelName = snapshot.model;
    this.#firstPrompt = snapshot.first_prompt;
    setText(this.#ui.first.firstElementChild, snapshot.first_prompt.text);
    this.#ui.first.hidden = false;
    for (const answer of this.#traced) answer.trace(snapshot);
  }

  // ------------------------------------------------------------------------------------------------------------ asking

  async #submit() {
    const prompt = this.#ui.prompt.value;
    if (this.#abort !== null || prompt.trim() === "") return;
    const mode = this.#ui.modeChat.checked ? "chat" : "completion";
    const example = this.#example?.prompt === prompt ? this.#example : null;
    // An example is a question on its own list: earlier lists would only be in its way.
    if (example !== null && this.#history.length > 0) this.#startAnew();
    this.#ui.prompt.value = "";
    this.#example = null;
    const images = mode === "chat" && !this.#attachments.isEmpty ? await this.#attachments.take() : [];
    const pictures = images.map(({ picture }) => picture);
    this.#add(userMessage(prompt, mode === "chat" ? "You" : "Prompt", pictures));
    this.#answer({ mode, prompt, example, content: contentOf(prompt, images) });
  }

  /** @param {HTMLElement | null} failed the article of an earlier attempt, whose place the answer takes */
  async #answer(question, failed = null) {
    const { mode, prompt, example, content } = question;
    const answer = new AssistantMessage(mode === "chat" ? "Model" : "Completion");
    if (failed === null) this.#add(answer.element);
    else failed.replaceWith(answer.element);
    this.#traced.push(answer);
    const history = this.#history;
    await this.#whileStreaming(async (signal) => {
      try {
        const asked = { role: "user", content };
        const body = { ...(await this.#settings()), ...(mode === "chat" ? { messages: [...history, asked] } : { prompt }) };
        for await (const piece of this.#api.generate(mode, body, signal)) {
          if (piece.requestId !== undefined) answer.accept(piece.requestId);
          if (piece.text !== undefined) this.#keepEndVisible(() => answer.append(piece.text));
          if (piece.finish === "length") answer.note("ended at max tokens");
        }
        answer.finish();
        if (example !== null) answer.judge(example.value);
      } catch (error) {
        if (signal.aborted) {
          answer.stop();
        } else {
          this.#fail(answer, error, question);
          return;
        }
      }
      // A conversation that was cleared meanwhile has a new history, and this exchange has no place in it.
      if (mode === "chat" && answer.text !== "") {
        history.push({ role: "user", content }, { role: "assistant", content: answer.text });
      }
    });
  }

  #fail(answer, error, question) {
    const failure = error instanceof ApiError ? error : new ApiError("page", String(error));
    this.#keepEndVisible(() =>
      answer.fail(failure, () => {
        if (this.#abort !== null) return;
        this.#ui.prompt.focus();
        this.#answer(question, answer.element);
      }),
    );
    if (failure.code === "invalid_api_key") this.#ui.settings.open = true;
  }

  async #settings() {
    const model = this.#modelName ?? (this.#modelName = await this.#api.modelName());
    const settings = { model };
    const maxTokens = this.#ui.maxTokens.valueAsNumber;
    const temperature = this.#ui.temperature.valueAsNumber;
    if (Number.isFinite(maxTokens)) settings.max_tokens = maxTokens;
    if (Number.isFinite(temperature)) settings.temperature = temperature;
    return settings;
  }

  /** Runs `work(signal)` with the buttons as they are while something streams. */
  async #whileStreaming(work) {
    const { send, stop, bursts } = this.#ui;
    const abort = (this.#abort = new AbortController());
    // A button that is disabled loses the focus to nothing: hand it to the one that can be used, and back.
    const pressed = [send, ...bursts].find((button) => button === document.activeElement);
    stop.disabled = false;
    if (pressed) stop.focus();
    for (const button of [send, ...bursts]) button.disabled = true;
    try {
      await work(abort.signal);
    } finally {
      this.#abort = null;
      for (const button of [send, ...bursts]) button.disabled = false;
      if (document.activeElement === stop) (pressed ?? send).focus();
      stop.disabled = true;
      this.#keepEndVisible(() => {});
    }
  }

  #stop() {
    this.#abort?.abort();
  }

  // ---------------------------------------------------------------------------------------------------------- examples

  async #offerExample() {
    const { note } = this.#ui;
    note.textContent = "";
    try {
      this.#example = await this.#api.example(EXAMPLE_TOKENS);
    } catch (error) {
      note.textContent = `No example: ${error.message}`;
      return;
    }
    // The model learned to answer in the form of a chat.
    this.#offer(this.#example.prompt, true);
  }

  /** Puts a text into the prompt box, for the user to send. */
  #offer(text, isChat) {
    const { prompt, modeChat, modeCompletion } = this.#ui;
    (isChat ? modeChat : modeCompletion).checked = true;
    prompt.value = text;
    prompt.focus();
    prompt.setSelectionRange(prompt.value.length, prompt.value.length);
    prompt.scrollTop = prompt.scrollHeight;
  }

  async #runBurst() {
    if (this.#abort !== null) return;
    const burst = new Burst(this.#api);
    this.#add(burst.element);
    this.#traced.push(burst);
    await this.#whileStreaming(async (signal) => burst.run(await this.#settings(), EXAMPLE_TOKENS, signal));
  }

  // --------------------------------------------------------------------------------------------------------------- log

  #startAnew() {
    this.#history = [];
    const line = document.createElement("p");
    line.className = "divider";
    line.textContent = "new conversation";
    this.#add(line);
  }

  #clear() {
    this.#stop();
    this.#history = [];
    this.#traced = [];
    this.#ui.log.replaceChildren(this.#ui.welcome);
    this.#ui.prompt.focus();
  }

  #add(element) {
    const { welcome, send } = this.#ui;
    // What is pressed in the welcome goes with it: the focus stays near.
    const isPressed = welcome.contains(document.activeElement);
    welcome.remove();
    if (isPressed) send.focus();
    this.#ui.log.append(element);
    this.#ui.log.scrollTop = this.#ui.log.scrollHeight;
  }

  #keepEndVisible(change) {
    const { log } = this.#ui;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    change();
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }
}
