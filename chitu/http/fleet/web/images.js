/* Images of the next message: chosen or pasted, shown small beside the prompt until they are sent. Each is drawn into a
 * canvas, since the page's policy lets the browser load no image from a URL of its own making. */

/** Side of the square that an image is shown in, in CSS pixels. */
const SIDE = 56;

export class Attachments {
  #list;
  #note;
  /** What was attached, in order: {url, picture}; a data URL and its canvas. */
  #images = [];
  /** Settles when the files that were given have been read. */
  #reading = Promise.resolve();
  #numReading = 0;

  /** @param ui {attach, files, attached, prompt, note}: button, file input, list, text box, status line */
  constructor({ attach, files, attached, prompt, note }) {
    this.#list = attached;
    this.#note = note;
    attach.addEventListener("click", () => files.click());
    files.addEventListener("change", () => {
      this.add([...files.files]);
      files.value = ""; // the same file may be chosen again
      prompt.focus();
    });
    prompt.addEventListener("paste", (event) => {
      const pasted = [...event.clipboardData.files];
      if (pasted.length === 0) return;
      event.preventDefault();
      this.add(pasted);
    });
  }

  add(files) {
    this.#note.textContent = "";
    for (const file of files) {
      // One after another: they are sent in this order.
      this.#numReading += 1;
      this.#reading = this.#reading.then(() => this.#read(file)).finally(() => (this.#numReading -= 1));
    }
  }

  get isEmpty() {
    return this.#images.length === 0 && this.#numReading === 0;
  }

  /** All images, which are no longer attached then. */
  async take() {
    await this.#reading;
    const taken = this.#images;
    this.#images = [];
    this.#list.replaceChildren();
    return taken;
  }

  async #read(file) {
    try {
      const [url, picture] = await Promise.all([dataUrl(file), drawn(file)]);
      this.#show({ url, picture }, file.name);
    } catch {
      this.#note.textContent = `${file.name || "The file"} is no image that can be shown`;
    }
  }

  #show(image, name) {
    this.#images.push(image);
    const { picture } = image;
    picture.setAttribute("aria-label", name || "pasted image");
    const item = document.createElement("li");
    const remove = document.createElement("button");
    remove.type = "button";
    remove.className = "quiet";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Remove ${name || "the pasted image"}`);
    remove.addEventListener("click", () => {
      this.#images = this.#images.filter((one) => one !== image);
      item.remove();
    });
    item.append(picture, remove);
    this.#list.append(item);
  }
}

/** The content of a message: its text, or parts if there are images. */
export function contentOf(text, images) {
  if (images.length === 0) return text;
  return [...images.map(({ url }) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** The whole image in a canvas. Rejects if the browser cannot decode it. */
async function drawn(file) {
  const bitmap = await createImageBitmap(file);
  const scale = (SIDE * devicePixelRatio) / Math.max(bitmap.width, bitmap.height);
  const canvas = document.createElement("canvas");
  canvas.setAttribute("role", "img");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas;
}
