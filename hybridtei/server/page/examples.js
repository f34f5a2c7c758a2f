// What each kind of vector is for. `answer`: the document that should come first. tests/server/page/test_examples.py reads the
// list as JSON, and asserts what the titles say of the embedded model.

export const EXAMPLES = [
  {
    "id": "fusion",
    "title": "Fusion is right, each alone is wrong",
    "query": "how fast can a jaguar run",
    "documents": [
      "The speed of the new Jaguar on the test track.",
      "How fast can you run a marathon?",
      "The jaguar, a big cat of the Americas, can run 80 km/h.",
      "How to run fast: a plan for beginners.",
      "How fast can a computer run this program?",
      "Cheetahs are the fastest animals on land."
    ],
    "answer": 2
  },
  {
    "id": "dense-errs",
    "title": "Dense is wrong: an identifier",
    "query": "error E4031",
    "documents": [
      "E4013: the access token has expired; sign in again.",
      "E4310: the upload was interrupted.",
      "E4031: the disk quota of the project is used up.",
      "An error occurred. Please try again later.",
      "Error messages, and how to read them.",
      "The printer is out of paper."
    ],
    "answer": 2
  },
  {
    "id": "sparse-errs",
    "title": "Sparse is wrong: other words, same meaning",
    "query": "signs of a heart attack",
    "documents": [
      "The heart of the team is its attack.",
      "A cyber attack leaves signs in the logs.",
      "Symptoms of myocardial infarction: chest pain, sweat, short breath.",
      "Heart and soul: a song for piano.",
      "Pain in the chest can have many causes."
    ],
    "answer": 2
  }
];
